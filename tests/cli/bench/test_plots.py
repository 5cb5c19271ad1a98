from __future__ import annotations

import re

import pytest

from asynckv.cli.bench.page import Bars, Line, Point, draw_histograms, draw_lines
from asynckv.cli.bench.report import Histogram, Spread


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
