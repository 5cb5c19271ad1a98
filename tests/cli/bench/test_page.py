"""The page, and how a real browser shows it."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from asynckv.cli.bench.page import (
    Bars,
    Line,
    Point,
    draw_histograms,
    draw_lines,
    lag_bars,
    latency_lines,
    render_page,
    throughput_lines,
)
from asynckv.cli.bench.report import BenchReport, Histogram, Spread

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


@pytest.mark.parametrize(
    ("words", "count"),
    [
        ("&lt;entry&gt;", None),
        ("a &lt;CPU&gt;", None),
        ("<CPU>", 0),
        ('<tr class="ok">', 3),
        ("VOID: turns of raw TCP differ by 40%", None),
        ("FAILED: PeerLost: the peer is gone", None),
        ("3 ok, 1 void (do not quote these), 1 failed", None),
        ('<span class="worse">9.0 times later than idle loop', None),
        (">GB/s (log scale)<", None),
        (">bytes of an entry (log scale)<", None),
        (">ms (log scale)<", None),
        (">requests outstanding (log scale)<", None),
        ('class="ours dot"', 1),
        ('class="raw dot"', 1),
    ],
)
def test_the_page_says_what_counts_and_names_are_no_markup(
    sample_report: BenchReport, words: str, count: int | None
) -> None:
    found = render_page(sample_report).count(words)
    assert found if count is None else found == count


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


def test_throughput_is_drawn_beside_raw_tcp_and_memcpy(
    sample_report: BenchReport,
) -> None:
    lines = throughput_lines(sample_report)
    assert [line.name for line in lines] == ["asynckv", "raw TCP", "memcpy"]
    assert [[point.x for point in line.points] for line in lines] == [
        [2**20, 2**26],
        [2**20, 2**26],
        [2**26],
    ]


def test_of_several_raw_baselines_the_first_is_drawn(
    sample_report: BenchReport,
) -> None:
    entry = sample_report.rows[0]
    first = entry.baselines[0]
    one_stream = msgspec.structs.replace(first, name="raw TCP, 1 stream", is_void=True)
    row = msgspec.structs.replace(entry, baselines=(first, one_stream))
    report = msgspec.structs.replace(sample_report, rows=(row,))
    (point,) = throughput_lines(report)[1].points
    assert point.is_sure


def test_points_of_void_rows_are_not_sure(sample_report: BenchReport) -> None:
    ours = throughput_lines(sample_report)[0]
    assert [point.is_sure for point in ours.points] == [False, True]


def test_each_contender_has_its_median_and_its_tail(sample_report: BenchReport) -> None:
    lines = latency_lines(sample_report)
    assert [line.name for line in lines] == [
        "asynckv, p50",
        "asynckv, p99",
        "streams, p50",
        "streams, p99",
    ]
    assert [line.points[0].value.median for line in lines] == [0.21, 0.42, 0.21, 0.42]


def test_lag_is_drawn_busy_and_idle(sample_report: BenchReport) -> None:
    names = [bars.name for bars in lag_bars(sample_report)]
    assert names == ["while payload moves", "idle loop"]


def test_a_report_without_rows_has_no_points(sample_report: BenchReport) -> None:
    report = msgspec.structs.replace(sample_report, rows=())
    lines = throughput_lines(report) + latency_lines(report)
    assert not any(line.points for line in lines)
    assert lag_bars(report) == []


def point(x: float, value: float, *, is_sure: bool = True) -> Point:
    return Point(x, Spread(value, value / 2, value * 2), is_sure)


def circles(svg: str) -> list[tuple[str, float, float]]:
    pattern = r'<circle class="([^"]*)" cx="([\d.]+)%" cy="([\d.]+)"'
    return [(kind, float(x), float(y)) for kind, x, y in re.findall(pattern, svg)]


def test_larger_values_are_drawn_further_right_and_higher() -> None:
    svg = draw_lines(
        "t", [Line("a", "ours", [point(1, 1), point(10, 5)])], "us", str, "x"
    )
    (_, x1, y1), (_, x2, y2) = circles(svg)
    assert x2 > x1
    assert y2 < y1


def test_equal_factors_are_equal_distances() -> None:
    points = [point(1, 1), point(10, 10), point(100, 100)]
    svg = draw_lines("t", [Line("a", "ours", points)], "us", str, "x")
    places = circles(svg)
    assert places[1][1] - places[0][1] == pytest.approx(places[2][1] - places[1][1])
    assert places[0][2] - places[1][2] == pytest.approx(places[1][2] - places[2][2])


def test_a_void_point_is_hollow_and_says_so() -> None:
    line = Line("a", "ours", [point(1, 1), point(2, 1, is_sure=False)])
    svg = draw_lines("t", [line], "us", str, "x")
    assert [kind for kind, _, _ in circles(svg)] == ["ours dot sure", "ours dot"]
    assert svg.count("(void)") == 1


def test_nothing_is_drawn_of_nothing() -> None:
    assert draw_lines("t", [Line("a", "ours", [])], "us", str, "x") == ""
    assert draw_histograms("t", [], "ms") == ""


def test_one_size_alone_can_be_drawn() -> None:
    assert circles(
        draw_lines("t", [Line("a", "ours", [point(7, 0.0)])], "us", str, "x")
    )


def test_a_bar_is_as_high_as_its_share_and_never_invisible() -> None:
    found = Histogram((0.0, 1.0, 2.0, 9.0), (9999, 1, 0))
    svg = draw_histograms("lag", [Bars("idle", "raw", found)], "ms")
    heights = [float(h) for h in re.findall(r'<rect [^>]*height="([\d.]+)"', svg)]
    assert heights[0] > 100 * heights[1] > 0
    assert heights[1:] == [1.5, 0.0]


def test_histograms_of_different_edges_are_not_compared() -> None:
    one, other = Histogram((0.0, 1.0), (1,)), Histogram((0.0, 2.0), (1,))
    with pytest.raises(ValueError, match="edges"):
        draw_histograms("lag", [Bars("a", "raw", one), Bars("b", "ours", other)], "ms")
