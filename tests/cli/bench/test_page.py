"""The page, and how a real browser shows it."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from asynckv.cli.bench.page import (
    Line,
    Plot,
    Point,
    draw_plot,
    plots_of,
    render_page,
)
from asynckv.cli.bench.report import BenchReport, Spread

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
        (">% of all ticks (log scale)<", None),
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


def lines_of(report: BenchReport, plot: int) -> dict[str, list[tuple[float, float]]]:
    """Return places and medians of each line of one plot."""
    return {
        f"{line.name}, {line.kind}": [(p.x, p.value.median) for p in line.points]
        for line in plots_of(report)[plot].lines
    }


def test_throughput_is_drawn_beside_raw_tcp_and_memcpy(
    sample_report: BenchReport,
) -> None:
    assert lines_of(sample_report, 0) == {
        "asynckv, ours": [(2**20, 3.0), (2**26, 3.0)],
        "raw TCP, raw": [(2**20, 3.5), (2**26, 3.3)],
        "memcpy, copy": [(2**26, 16.0)],
    }


def test_of_several_raw_baselines_the_first_is_drawn(
    sample_report: BenchReport,
) -> None:
    entry = sample_report.rows[0]
    first = entry.baselines[0]
    one_stream = msgspec.structs.replace(first, name="raw TCP, 1 stream", is_void=True)
    row = msgspec.structs.replace(entry, baselines=(first, one_stream))
    report = msgspec.structs.replace(sample_report, rows=(row,))
    (point,) = plots_of(report)[0].lines[1].points
    assert point.is_sure


def test_points_of_void_rows_are_not_sure(sample_report: BenchReport) -> None:
    ours = plots_of(sample_report)[0].lines[0]
    assert [point.is_sure for point in ours.points] == [False, True]


def test_each_contender_has_its_median_and_its_tail(sample_report: BenchReport) -> None:
    assert lines_of(sample_report, 1) == {
        "asynckv, ours": [(1, 0.21)],
        "asynckv, ours thin": [(1, 0.42)],
        "bare asyncio streams, raw": [(1, 0.21)],
        "bare asyncio streams, raw thin": [(1, 0.42)],
    }


def test_of_lag_the_share_of_ticks_is_drawn_that_were_so_late_or_later(
    sample_report: BenchReport,
) -> None:
    assert lines_of(sample_report, 2) == {
        "asynckv, ours": [(1.0, 4.0), (10.0, 0.2)],
        "idle loop, raw": [(1.0, 0.2), (10.0, 0.02)],
    }


def test_what_never_came_so_late_is_no_point(sample_report: BenchReport) -> None:
    lag = sample_report.rows[3]
    assert lag.ours is not None and lag.ours.histogram is not None
    histogram = msgspec.structs.replace(lag.ours.histogram, counts=(9, 1, 0))
    ours = msgspec.structs.replace(lag.ours, histogram=histogram)
    rows = (msgspec.structs.replace(lag, ours=ours),)
    report = msgspec.structs.replace(sample_report, rows=rows)
    assert lines_of(report, 2)["asynckv, ours"] == [(1.0, 10.0)]


def test_a_report_without_rows_has_no_points(sample_report: BenchReport) -> None:
    report = msgspec.structs.replace(sample_report, rows=())
    assert not any(line.points for plot in plots_of(report) for line in plot.lines)


def point(x: float, value: float, *, is_sure: bool = True) -> Point:
    return Point(x, Spread(value, value / 2, value * 2), is_sure)


def draw(*points: Point) -> str:
    lines = (Line("a", "ours", points),)
    return draw_plot(
        Plot(title="t", note="", unit="us", x_title="x", write_x=str, lines=lines)
    )


def circles(*points: Point) -> list[tuple[str, float, float]]:
    pattern = r'<circle class="([^"]*)" cx="([\d.]+)%" cy="([\d.]+)"'
    found = re.findall(pattern, draw(*points))
    return [(kind, float(x), float(y)) for kind, x, y in found]


def test_larger_values_are_drawn_further_right_and_higher() -> None:
    (_, x1, y1), (_, x2, y2) = circles(point(1, 1), point(10, 5))
    assert x2 > x1
    assert y2 < y1


def test_equal_factors_are_equal_distances() -> None:
    places = circles(point(1, 1), point(10, 10), point(100, 100))
    assert places[1][1] - places[0][1] == pytest.approx(places[2][1] - places[1][1])
    assert places[0][2] - places[1][2] == pytest.approx(places[1][2] - places[2][2])


def test_every_decade_has_its_line() -> None:
    svg = draw(point(1, 1), point(10, 100))
    assert svg.count('class="grid"') == 5
    assert re.findall(r'dx="-10"[^>]*>([^<]+)<', svg) == [
        "0.1",
        "1",
        "10",
        "100",
        "1,000",
    ]


def test_a_void_point_is_hollow_and_says_so() -> None:
    points = point(1, 1), point(2, 1, is_sure=False)
    assert [kind for kind, _, _ in circles(*points)] == ["ours dot sure", "ours dot"]
    assert draw(*points).count("(void)") == 1


def test_nothing_is_drawn_of_nothing() -> None:
    assert draw() == ""


def test_one_size_alone_can_be_drawn() -> None:
    assert circles(point(7, 0.0))
