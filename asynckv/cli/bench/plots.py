"""The page's plots, as wide as the window: only places scale, letters never do.

Horizontal places are percentages of the picture; colours are those of the page's
style. A point is filled where its row counts, and hollow where the row is void.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from html import escape

from asynckv.cli.bench.curves import Bars, Line, Point
from asynckv.cli.bench.wording import write_bin, write_number

__all__ = ("draw_histograms", "draw_lines")

_HEIGHT = 340
_TOP, _BOTTOM = 34, 56
_SIDE = 5.0  # percent, beside the first and the last place


@dataclasses.dataclass(frozen=True)
class _Axis:
    """Values to places, logarithmically."""

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
    title: str,
    lines: Sequence[Line],
    unit: str,
    write_x: Callable[[float], str],
    x_title: str,
) -> str:
    """Draw lines over logarithmic axes; the empty text if there are no points."""
    points = [point for line in lines for point in line.points]
    if not points:
        return ""
    x = _x_axis([point.x for point in points])
    y = _y_axis(points)
    parts = [_text(0, 14, f"{unit} (log scale)", "start", dx=-66), *_y_grid(y)]
    parts.append(_text(100, _HEIGHT - 6, f"{x_title} (log scale)", "end"))
    for place in sorted({point.x for point in points}):
        words = write_x(place)
        parts.append(_text(x.place(place), _HEIGHT - _BOTTOM + 18, words, "middle"))
    for line in lines:
        parts += _draw_line(line, x, y, unit)
    return _svg(title, parts)


def _x_axis(values: Sequence[float]) -> _Axis:
    least, most = min(values), max(values)
    if least == most:
        least, most = least / 2, most * 2
    return _Axis(least, most, _SIDE, 100 - _SIDE)


def _y_axis(points: Sequence[Point]) -> _Axis:
    """Whole decades around everything that is drawn."""
    least = max(min(point.value.least for point in points), 1e-6)
    most = max(max(point.value.most for point in points), least * 1.01)
    low, high = math.floor(math.log10(least)), math.ceil(math.log10(most))
    return _Axis(10.0**low, 10.0**high, _HEIGHT - _BOTTOM, _TOP)


def _y_grid(y: _Axis) -> list[str]:
    parts = []
    for value in y.decades():
        at = y.place(value)
        parts.append(_line("grid", (0, at), (100, at)))
        parts.append(_text(0, at + 4, write_number(value), "end", dx=-10))
    return parts


def _draw_line(line: Line, x: _Axis, y: _Axis, unit: str) -> list[str]:
    places = [(x.place(p.x), y.place(p.value.median)) for p in line.points]
    parts = [_line(line.kind, one, next_) for one, next_ in itertools.pairwise(places)]
    for (left, top), point in zip(places, line.points, strict=True):
        low, high = y.place(point.value.least), y.place(point.value.most)
        sure = " sure" if point.is_sure else ""
        hint = f"{line.name}: {write_number(point.value.median)} {unit}"
        hint += "" if point.is_sure else " (void)"
        parts.append(_line(f"{line.kind} whisker", (left, low), (left, high)))
        parts.append(
            f'<circle class="{line.kind} dot{sure}" cx="{left}%" cy="{top}" r="4">'
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
    parts = [_text(0, 14, "share of all ticks", "start", dx=-66)]
    parts += [part for share in (0.0, 0.25, 0.5, 0.75, 1.0) for part in _share(share)]
    step = 100 / (len(edges) - 1)
    for index in range(len(edges) - 1):
        left = index * step
        # Every other label is lower: so they fit in a narrow window.
        at = _HEIGHT - _BOTTOM + 18 + 14 * (index % 2)
        parts.append(_text(left + step / 2, at, write_bin(edges, index), "middle"))
        parts += _draw_bars(all_bars, index, left, step)
    parts.append(_text(100, _HEIGHT - 4, f"{unit} late", "end"))
    return _svg(title, parts)


def _share(share: float) -> list[str]:
    at = _share_place(share)
    return [
        _line("grid", (0, at), (100, at)),
        _text(0, at + 4, f"{share:.0%}", "end", dx=-10),
    ]


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
        place = f'x="{round(left + step * 0.1 + number * width, 2)}%"'
        place += f' y="{round(_share_place(0.0) - height, 2)}"'
        place += f' width="{width}%" height="{round(height, 2)}"'
        parts.append(
            f'<rect class="{bars.kind}" {place}>'
            f"<title>{escape(bars.name)}: {count:,} of {total:,}</title></rect>"
        )
    return parts


def _line(kind: str, one: tuple[float, float], other: tuple[float, float]) -> str:
    (x1, y1), (x2, y2) = one, other
    place = f'x1="{x1}%" y1="{y1}" x2="{x2}%" y2="{y2}"'
    return f'<line class="{kind}" {place}/>'


def _text(x: float, y: float, words: str, anchor: str, *, dx: int = 0) -> str:
    place = f'x="{round(x, 2)}%" y="{round(y, 2)}" dx="{dx}" text-anchor="{anchor}"'
    return f'<text class="tick" {place}>{escape(words)}</text>'


def _svg(title: str, parts: list[str]) -> str:
    label = f'role="img" aria-label="{escape(title)}"'
    return f'<svg height="{_HEIGHT}" {label}>{"".join(parts)}</svg>'
