"""The page's plots: inline SVG that takes its colours from the page's style.

A point is filled where its row counts, and hollow where the row is void.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from html import escape

from asynckv.cli.bench.curves import Bars, Line, Point
from asynckv.cli.bench.wording import write_bin, write_number

__all__ = ("draw_histograms", "draw_lines")

_WIDTH, _HEIGHT = 960, 320
_LEFT, _RIGHT, _TOP, _BOTTOM = 76, 24, 20, 40


@dataclasses.dataclass(frozen=True)
class _Axis:
    """Values to pixels, logarithmically."""

    least: float
    most: float
    start: float
    end: float

    def place(self, value: float) -> float:
        low, high = math.log10(self.least), math.log10(self.most)
        share = (math.log10(max(value, self.least)) - low) / max(high - low, 1e-9)
        return round(self.start + share * (self.end - self.start), 2)

    def decades(self) -> list[float]:
        first = math.ceil(math.log10(self.least) - 1e-9)
        last = math.floor(math.log10(self.most) + 1e-9)
        return [10.0**power for power in range(first, last + 1)]


def draw_lines(
    title: str, lines: Sequence[Line], unit: str, write_x: Callable[[float], str]
) -> str:
    """Draw lines over logarithmic axes; the empty text if there are no points."""
    points = [point for line in lines for point in line.points]
    if not points:
        return ""
    x = _x_axis([point.x for point in points])
    y = _y_axis(points)
    parts = _y_grid(y, unit)
    for place in sorted({point.x for point in points}):
        at = x.place(place)
        parts.append(_text(at, _HEIGHT - _BOTTOM + 18, write_x(place), "middle"))
    for line in lines:
        parts += _draw_line(line, x, y, unit)
    return _svg(title, parts)


def _x_axis(values: Sequence[float]) -> _Axis:
    least, most = min(values), max(values)
    if least == most:
        least, most = least / 2, most * 2
    return _Axis(least, most, _LEFT + 30, _WIDTH - _RIGHT - 30)


def _y_axis(points: Sequence[Point]) -> _Axis:
    """Whole decades around everything that is drawn."""
    least = max(min(point.value.least for point in points), 1e-6)
    most = max(max(point.value.most for point in points), least * 1.01)
    low, high = math.floor(math.log10(least)), math.ceil(math.log10(most))
    return _Axis(10.0**low, 10.0**high, _HEIGHT - _BOTTOM, _TOP)


def _y_grid(y: _Axis, unit: str) -> list[str]:
    parts = []
    for value in y.decades():
        at = y.place(value)
        parts.append(
            f'<line class="grid" x1="{_LEFT}" y1="{at}" x2="{_WIDTH - _RIGHT}" '
            f'y2="{at}"/>'
        )
        parts.append(_text(_LEFT - 10, at + 4, f"{write_number(value)} {unit}", "end"))
    return parts


def _draw_line(line: Line, x: _Axis, y: _Axis, unit: str) -> list[str]:
    if not line.points:
        return []
    places = [(x.place(p.x), y.place(p.value.median), p) for p in line.points]
    path = "L".join(f"{left},{top}" for left, top, _ in places)
    parts = [f'<path class="{line.kind}" d="M{path}"/>']
    for left, top, point in places:
        low, high = y.place(point.value.least), y.place(point.value.most)
        sure = " sure" if point.is_sure else ""
        hint = f"{line.name}: {write_number(point.value.median)} {unit}"
        hint += "" if point.is_sure else " (void)"
        parts.append(f'<path class="{line.kind} whisker" d="M{left},{low}V{high}"/>')
        parts.append(
            f'<circle class="{line.kind} dot{sure}" cx="{left}" cy="{top}" r="4">'
            f"<title>{escape(hint)}</title></circle>"
        )
    return parts


def draw_histograms(title: str, all_bars: Sequence[Bars], unit: str) -> str:
    """Draw histograms of equal edges side by side, their counts as shares.

    :raises ValueError: the edges differ
    """
    if not all_bars:
        return ""
    edges = all_bars[0].histogram.edges
    if any(bars.histogram.edges != edges for bars in all_bars):
        raise ValueError("histograms of different edges cannot be compared")
    parts = [_share_line(share) for share in (0.0, 0.25, 0.5, 0.75, 1.0)]
    step = (_WIDTH - _LEFT - _RIGHT) / (len(edges) - 1)
    for index in range(len(edges) - 1):
        left = _LEFT + index * step
        label = write_bin(edges, index)
        middle = round(left + step / 2, 2)
        parts.append(_text(middle, _HEIGHT - _BOTTOM + 18, label, "middle"))
        parts += _draw_bars(all_bars, index, left, step)
    parts.append(_text(_WIDTH - _RIGHT, _HEIGHT - 4, f"{unit} late", "end"))
    return _svg(title, parts)


def _share_line(share: float) -> str:
    at = _share_place(share)
    line = f'x1="{_LEFT}" y1="{at}" x2="{_WIDTH - _RIGHT}" y2="{at}"'
    return f'<line class="grid" {line}/>' + _text(
        _LEFT - 10, at + 4, f"{share:.0%}", "end"
    )


def _share_place(share: float) -> float:
    return round(_HEIGHT - _BOTTOM - share * (_HEIGHT - _BOTTOM - _TOP), 2)


def _draw_bars(
    all_bars: Sequence[Bars], index: int, left: float, step: float
) -> list[str]:
    width = round(step * 0.8 / len(all_bars), 2)
    parts = []
    for number, bars in enumerate(all_bars):
        counts = bars.histogram.counts
        count, total = counts[index], sum(counts)
        top = _share_place(count / max(total, 1))
        # A bin that has any value is seen.
        height = max(_share_place(0.0) - top, 1.5 if count else 0.0)
        place = f'x="{round(left + step * 0.1 + number * width, 2)}"'
        place += f' y="{round(_share_place(0.0) - height, 2)}"'
        place += f' width="{width}" height="{round(height, 2)}"'
        parts.append(
            f'<rect class="{bars.kind}" {place}>'
            f"<title>{escape(bars.name)}: {count:,} of {total:,}</title></rect>"
        )
    return parts


def _text(x: float, y: float, words: str, anchor: str) -> str:
    place = f'x="{x}" y="{round(y, 2)}" text-anchor="{anchor}"'
    return f'<text class="tick" {place}>{escape(words)}</text>'


def _svg(title: str, parts: list[str]) -> str:
    label = f'role="img" aria-label="{escape(title)}"'
    box = f'viewBox="0 0 {_WIDTH} {_HEIGHT}"'
    return f"<svg {box} {label}>{''.join(parts)}</svg>"
