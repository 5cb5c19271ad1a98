"""The page, and how a real browser shows it."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from asynckv.cli.bench.page import render_page
from asynckv.cli.bench.report import BenchReport

LookAt = Callable[..., dict[str, Any]]

# What to look for in this page alone: expressions of the browser's.
SEEN = {
    "plots": 'all("svg").length',
    "rows": 'all("#rows tbody tr").length',
    "smallest": 'Math.min(...all("svg text").map(one => box(one).height))',
}


def test_the_page_refers_to_nothing_outside_itself(sample_report: BenchReport) -> None:
    page = render_page(sample_report)
    assert not re.search(r"https?:|\ssrc=|@import|url\(|<link|<script", page)


def test_names_cannot_become_markup(sample_report: BenchReport) -> None:
    page = render_page(sample_report)
    assert "&lt;entry&gt;" in page
    assert "a &lt;CPU&gt;" in page
    assert "<CPU>" not in page


def test_rows_that_do_not_count_are_marked(sample_report: BenchReport) -> None:
    page = render_page(sample_report)
    assert page.count('<tr class="ok">') == 3
    assert "VOID: turns of raw TCP differ by 40%" in page
    assert "FAILED: PeerLost: the peer is gone" in page
    assert "3 ok, 1 void (do not quote these), 1 failed" in page


def test_a_row_says_which_way_is_better(sample_report: BenchReport) -> None:
    page = render_page(sample_report)
    assert '<span class="worse">9.0 times later than idle loop' in page


def test_axes_say_what_they_are(sample_report: BenchReport) -> None:
    page = render_page(sample_report)
    titles = ("GB/s", "bytes of an entry", "ms", "requests outstanding")
    assert all(f">{title} (log scale)<" in page for title in titles)


def test_the_points_of_a_void_row_are_hollow(sample_report: BenchReport) -> None:
    page = render_page(sample_report)
    assert page.count('class="ours dot"') == 1
    assert page.count('class="raw dot"') == 1


def test_a_report_without_rows_is_a_page_too(sample_report: BenchReport) -> None:
    page = render_page(msgspec.structs.replace(sample_report, rows=()))
    assert "<svg" not in page
    assert page.count("Nothing was measured") == 3


@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1100, 420])
def test_a_browser_shows_the_page(
    sample_report: BenchReport, look_at: LookAt, dark: bool, width: int
) -> None:
    seen = look_at(render_page(sample_report), SEEN, dark=dark, width=width)
    assert (seen["plots"], seen["rows"]) == (3, 5)
    assert seen["smallest"] > 10
    assert (seen["overflow"], seen["clipped"], seen["fetched"]) == (0, 0, 0)
    paper, ink = seen["paper"], seen["ink"]
    assert (ink - paper if dark else paper - ink) > 500
