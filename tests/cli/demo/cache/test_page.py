"""The page and the table, and how a real browser shows the page."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from rich.console import Console

from asynckv.cli.demo.cache.page import headline, render_page
from asynckv.cli.demo.cache.report import CacheReport
from asynckv.cli.demo.command import cache_table

LookAt = Callable[..., dict[str, Any]]

SEEN = {
    "rows": 'all("#first-tokens .request").length',
    "bars": 'all("#first-tokens .bar").length',
    "sources": 'all("#sources .request").length',
    "thinnest": 'Math.min(...all(".bar i").map(one => box(one).width))',
    "beyond": 'all(".bar b").filter(one => box(one).right > root.clientWidth).length',
    "longest": 'Math.max(...all(".bar i").map(one => box(one).width))',
    "verdict": 'text("#verdict")',
}


def test_the_page_refers_to_nothing_outside_itself(cache_report: CacheReport) -> None:
    page = render_page(cache_report)
    assert not re.search(r"https?:|\ssrc=|@import|url\(|<link|<script", page)


def test_the_headline_says_both_first_tokens_and_their_ratios(
    cache_report: CacheReport,
) -> None:
    document, killed = headline(cache_report)
    assert "after 250 ms, 10% of the 2.50 s" in document
    assert "after 300 ms, 12% of the 2.40 s" in killed


@pytest.mark.parametrize(
    "words",
    [
        "10% of the 2.50&nbsp;s",
        "nothing stored, engine 2",
        '<p class="verdict" id="verdict">the same tokens, whatever was found</p>',
        "engine 2 (process 4711) and the server (process 4712)",
        "When the disk had 42 blocks,",
        '<td class="value">82.6 MB</td><td class="remark">28 blocks, by both engines',
        "of 1,800 tokens 8 computed, 1,800 without · blocks: disk 28",
        "asynckv 0.1.0 · 2026-01-02 03:04 UTC · a CPU · Python 3.11.7, torch 2.13.0",
    ],
)
def test_the_page_says_what_was_seen(cache_report: CacheReport, words: str) -> None:
    assert words in render_page(cache_report)


def test_the_page_says_what_went_wrong_and_nothing_becomes_markup(
    cache_report: CacheReport,
) -> None:
    bad = msgspec.structs.replace(cache_report, problems=("turn <2>",), model="<m>")
    page = render_page(bad)
    assert "<li>turn &lt;2&gt;</li>" in page and "&lt;m&gt;" in page
    assert "but something else went wrong" in page
    cold = msgspec.structs.replace(cache_report.cold, tokens=(9,))
    page = render_page(msgspec.structs.replace(cache_report, cold=cold))
    assert 'id="verdict">tokens differ' in page


def test_blocks_that_never_came_to_the_disk_are_told(cache_report: CacheReport) -> None:
    page = render_page(msgspec.structs.replace(cache_report, blocks_missing=3))
    assert "When the disk had 42 blocks, 3 not, " in page


def test_the_terminal_has_a_row_for_each_request(cache_report: CacheReport) -> None:
    console = Console(file=io.StringIO(), width=110)
    bad = msgspec.structs.replace(cache_report, problems=("turn 2: less",))
    console.print(cache_table(bad))
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue()
    assert len(re.findall(r"^(question|turn|the new|the old) ", shown, re.M)) == 14
    assert "10% of the 2.50 s" in " ".join(shown.split())
    assert "problem: turn 2: less" in shown


@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.parametrize(
    ("dark", "width"), [(False, 1100), (True, 420)], ids=["light", "dark and narrow"]
)
def test_a_browser_shows_the_page(
    cache_report: CacheReport, look_at: LookAt, dark: bool, width: int
) -> None:
    seen = look_at(render_page(cache_report), SEEN, dark=dark, width=width)
    assert (seen["rows"], seen["bars"], seen["sources"]) == (14, 28, 14)
    assert (seen["overflow"], seen["beyond"], seen["fetched"]) == (0, 0, 0)
    assert seen["thinnest"] >= 2
    assert seen["longest"] > width / 3
    paper, ink = seen["paper"], seen["ink"]
    assert (ink - paper if dark else paper - ink) > 500
