"""The page, and how a real browser shows it."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from asynckv.cli.demo.page import render_page
from asynckv.cli.demo.report import DemoReport

LookAt = Callable[..., dict[str, Any]]

# What to look for in this page alone: expressions of the browser's.
SEEN = {
    "rows": 'all(".row").length',
    "thinnest": 'Math.min(...all("rect, .track i").map(one => box(one).width))',
    "smallest": 'Math.min(...all("svg text").map(one => box(one).height))',
    "compute": 'brightness("rect.compute", "fill")',
    "text": 'text("#text")',
    "verdict": 'text("#verdict")',
}


def test_the_page_refers_to_nothing_outside_itself(sample_report: DemoReport) -> None:
    page = render_page(sample_report)
    assert not re.search(r"https?:|\ssrc=|@import|url\(|<link|<script", page)


def test_text_of_the_model_cannot_become_markup(sample_report: DemoReport) -> None:
    page = render_page(msgspec.structs.replace(sample_report, text="<b>&</b>"))
    assert "&lt;b&gt;&amp;&lt;/b&gt;" in page


def test_the_page_shouts_when_tokens_differ(sample_report: DemoReport) -> None:
    bulk = msgspec.structs.replace(sample_report.bulk, tokens=())
    page = render_page(msgspec.structs.replace(sample_report, bulk=bulk))
    assert '<p class="verdict bad" id="verdict">tokens differ</p>' in page


def test_the_page_lists_what_went_wrong(sample_report: DemoReport) -> None:
    report = msgspec.structs.replace(sample_report, problems=("Bulk: <2> positions",))
    assert "<li>Bulk: &lt;2&gt; positions</li>" in render_page(report)


@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_a_browser_shows_the_page(
    sample_report: DemoReport, look_at: LookAt, dark: bool
) -> None:
    seen = look_at(render_page(sample_report), SEEN, dark=dark)
    assert seen["rows"] == 60
    assert seen["thinnest"] >= 0.5
    assert (seen["overflow"], seen["clipped"], seen["fetched"]) == (0, 0, 0)
    assert seen["text"] == sample_report.text
    assert seen["verdict"] == "every act generated the same tokens"
    paper, ink = seen["paper"], seen["ink"]
    assert (ink - paper if dark else paper - ink) > 500
    assert abs(seen["compute"] - paper) > 200


@pytest.mark.multiprocess
@pytest.mark.slow
def test_a_narrow_window_does_not_scroll_and_letters_are_as_large(
    sample_report: DemoReport, look_at: LookAt
) -> None:
    seen = look_at(render_page(sample_report), SEEN, dark=False, width=420)
    assert (seen["overflow"], seen["clipped"]) == (0, 0)
    assert seen["smallest"] > 10


def test_the_page_says_which_device_both_are_on(sample_report: DemoReport) -> None:
    assert "share its cores" in render_page(sample_report)
    on_gpu = msgspec.structs.replace(sample_report, device="cuda:0 (<H200>)")
    assert render_page(on_gpu).count("cuda:0 (&lt;H200&gt;)") == 3


def test_the_page_names_version_date_host_and_torch(sample_report: DemoReport) -> None:
    expected = "asynckv 0.1.0 · 2026-01-02 03:04 UTC · a CPU · Python 3.11.7, torch 2.1"
    assert expected in render_page(sample_report)


def test_the_page_compares_nothing_across_two_clocks(sample_report: DemoReport) -> None:
    page = render_page(sample_report)
    assert "sooner, " not in page and "times" not in page
    assert "25.0 ms before the prefill&#x27;s compute ended" in page
