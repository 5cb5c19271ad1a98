"""The bench's page: one self-contained HTML file, in light and in dark.

A pure function of the report; nothing on the page is fetched from anywhere. A point is
filled where its row counts, and hollow where the row is void.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from html import escape

from asynckv.cli.bench.report import (
    Baseline,
    BenchReport,
    Group,
    Measured,
    Row,
    Spread,
    Subject,
)
from asynckv.cli.bench.wording import (
    speedup_of,
    write_comparison,
    write_cpu,
    write_facts,
    write_nbytes,
    write_number,
    write_summary,
    write_value,
    write_verdict,
)
from asynckv.cli.document import (
    draw_line,
    draw_text,
    picture_of,
    write_document,
    write_head,
    write_section,
)

__all__ = (
    "Line",
    "Plot",
    "Point",
    "draw_plot",
    "plots_of",
    "render_page",
)


@dataclasses.dataclass(frozen=True)
class Point:
    """One value over ``x``; the whisker is its spread."""

    x: float
    value: Spread
    is_sure: bool = True


@dataclasses.dataclass(frozen=True)
class Line:
    """Points of one contender; ``kind`` is a class of the page's style."""

    name: str
    kind: str
    points: Sequence[Point]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plot:
    """Lines over logarithmic axes, and what to know of them."""

    title: str
    note: str
    unit: str
    x_title: str
    write_x: Callable[[float], str]
    lines: Sequence[Line]


def plots_of(report: BenchReport) -> list[Plot]:
    """Return throughput over size, latency over outstanding requests, and lag."""
    return [
        Plot(
            title="Throughput against size",
            note="Higher is better. An entry is found, lent, moved and acknowledged: "
            "for a small one that takes longer than its bytes do.",
            unit="GB/s",
            x_title="bytes of an entry",
            write_x=lambda x: write_nbytes(int(x)),
            lines=(
                _line(report, "throughput", "asynckv", "ours", _over_nbytes),
                _line(report, "throughput", "raw TCP", "raw", _over_nbytes),
                _line(report, "throughput", "memcpy", "copy", _over_nbytes),
            ),
        ),
        Plot(
            title="Latency against outstanding requests",
            note="Lower is better. Half of the requests took less than the line (p50), "
            "99% less than the dashed line (p99).",
            unit="ms",
            x_title="requests outstanding",
            write_x=lambda x: f"{x:,.0f}",
            lines=(
                _line(report, "concurrency", "asynckv", "ours", _p50),
                _line(report, "concurrency", "asynckv", "ours thin", _p99),
                _line(report, "concurrency", "bare asyncio streams", "raw", _p50),
                _line(report, "concurrency", "bare asyncio streams", "raw thin", _p99),
            ),
        ),
        Plot(
            title="Loop lag",
            note="How many of the ticks that were due every 1 ms the event loop ran "
            "so late or later, while payload moved and while it was idle. Lower is "
            "better.",
            unit="% of all ticks",
            x_title="ms late",
            write_x=lambda x: f"{x:g}",
            lines=(
                _line(report, "lag", "asynckv", "ours", _over_lateness),
                _line(report, "lag", "idle loop", "raw", _over_lateness),
            ),
        ),
    ]


_Values = Iterator[tuple[float, Spread]]
"""Values of one contender of a row, each with its place."""


def _over_nbytes(subject: Subject, found: Measured) -> _Values:
    yield subject.parts * subject.part_nbytes, found.value


def _p50(subject: Subject, found: Measured) -> _Values:
    if found.calls is not None:
        yield subject.outstanding, _exactly(found.calls.p50 / 1e3)


def _p99(subject: Subject, found: Measured) -> _Values:
    if found.calls is not None:
        yield subject.outstanding, _exactly(found.calls.p99 / 1e3)


def _over_lateness(_: Subject, found: Measured) -> _Values:
    """The share of all ticks from each inner edge of the histogram on."""
    if found.histogram is not None:
        edges, counts = found.histogram.edges, found.histogram.counts
        for index in range(1, len(counts)):
            if later := sum(counts[index:]):  # nothing has no logarithm
                yield edges[index], _exactly(100 * later / sum(counts))


def _exactly(value: float) -> Spread:
    return Spread(value, value, value)


def _line(
    report: BenchReport,
    group: Group,
    name: str,
    kind: str,
    values: Callable[[Subject, Measured], _Values],
) -> Line:
    points = [
        Point(x, value, is_sure)
        for row in report.rows
        if row.subject.group == group
        for found, is_sure in _contender(row, name)
        for x, value in values(row.subject, found)
    ]
    return Line(name, kind, sorted(points, key=lambda point: point.x))


def _contender(row: Row, name: str) -> list[tuple[Measured, bool]]:
    """Return its figures, if it has some, and whether they count.

    Of several raw baselines the first: with as many streams as there are lanes.
    """
    if name == "asynckv":
        return [(row.ours, row.verdict == "ok")] if row.ours is not None else []
    beside = [one for one in row.baselines if one.name.startswith(name)]
    return [(one.measured, not one.is_void) for one in beside[:1]]


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


def draw_plot(plot: Plot) -> str:
    """Draw a plot; the empty text if there are no points."""
    points = [point for line in plot.lines for point in line.points]
    if not points:
        return ""
    x, y = _x_axis(points), _y_axis(points)
    parts = [
        draw_text("tick", 0, 14, f"{plot.unit} (log scale)", "start", dx=-66),
        draw_text("tick", 100, _HEIGHT - 6, f"{plot.x_title} (log scale)", "end"),
    ]
    for power in range(round(math.log10(y.least)), round(math.log10(y.most)) + 1):
        at, words = y.place(10.0**power), write_number(10.0**power)
        parts.append(draw_line("grid", (0, at), (100, at)))
        parts.append(draw_text("tick", 0, at + 4, words, "end", dx=-10))
    below = _HEIGHT - _BOTTOM + 18
    for place in sorted({point.x for point in points}):
        words = plot.write_x(place)
        parts.append(draw_text("tick", x.place(place), below, words, "middle"))
    for line in plot.lines:
        parts += _draw_line(line, x, y, plot.unit)
    return picture_of(_HEIGHT, plot.title, parts)


def _x_axis(points: Sequence[Point]) -> _Axis:
    least, most = min(point.x for point in points), max(point.x for point in points)
    if least == most:
        least, most = least / 2, most * 2
    return _Axis(least, most, _SIDE, 100 - _SIDE)


def _y_axis(points: Sequence[Point]) -> _Axis:
    """Whole decades around everything that is drawn."""
    least = max(min(point.value.least for point in points), 1e-6)
    most = max(max(point.value.most for point in points), least * 1.01)
    low, high = math.floor(math.log10(least)), math.ceil(math.log10(most))
    return _Axis(10.0**low, 10.0**high, _HEIGHT - _BOTTOM, _TOP)


def _draw_line(line: Line, x: _Axis, y: _Axis, unit: str) -> Iterator[str]:
    places = [(x.place(p.x), y.place(p.value.median)) for p in line.points]
    for one, next_ in itertools.pairwise(places):
        yield draw_line(line.kind, one, next_)
    for (left, top), point in zip(places, line.points, strict=True):
        low, high = y.place(point.value.least), y.place(point.value.most)
        sure, void = (" sure", "") if point.is_sure else ("", " (void)")
        hint = f"{line.name}: {write_number(point.value.median)} {unit}{void}"
        yield draw_line(f"{line.kind} whisker", (left, low), (left, high))
        yield (
            f'<circle class="{line.kind} dot{sure}" cx="{left}%" cy="{top}" r="4">'
            f"<title>{escape(hint)}</title></circle>"
        )


_NOT_DRAWN = '<p class="note">Nothing was measured that could be drawn here.</p>'


def render_page(report: BenchReport) -> str:
    """Return the whole page as text."""
    rounds = max((row.rounds for row in report.rows), default=0)
    head = write_head("asynckv bench", write_facts(report))
    sections = "\n".join(map(_section, plots_of(report)))
    body = (
        f'{head}\n<p class="summary" id="summary">{escape(write_summary(report))}</p>\n'
        '<p class="note">Every figure was measured in rounds, each between two turns '
        "of its baseline. Read the comparisons: absolute figures drift. Void rows, and "
        "hollow points, do not count: the baseline did not agree with itself, or the "
        f"rounds not with each other.</p>\n{sections}\n{_table(report)}\n"
        f"<footer>Written by <code>asynckv bench</code> after {report.seconds:.0f} s, "
        f"{rounds} rounds a case.</footer>"
    )
    return write_document("asynckv bench", __package__, body)


def _section(plot: Plot) -> str:
    entries = (
        f'<li style="--swatch: var(--{line.kind})">{escape(line.name)}</li>'
        for line in plot.lines
        if not line.kind.endswith("thin")
    )
    key = f'<ul class="key">{"".join(entries)}</ul>'
    return write_section(plot.title, plot.note, key, draw_plot(plot) or _NOT_DRAWN)


def _table(report: BenchReport) -> str:
    names = ("case", "asynckv", "beside, in the same rounds", "")
    head = "".join(f"<th>{name}</th>" for name in names)
    rows = "\n".join(map(_table_row, report.rows))
    return write_section(
        "All rows",
        "Medians of the rounds [least-most].",
        f'<table id="rows"><thead><tr>{head}</tr></thead>',
        f"<tbody>\n{rows}\n</tbody></table>",
    )


def _table_row(row: Row) -> str:
    beside = [
        (_direction(row.subject, one), write_comparison(row.subject, one))
        for one in row.baselines
    ]
    if cpu := write_cpu(row):
        beside.append(("cpu", cpu))
    lines = (f'<span class="{kind}">{escape(words)}</span>' for kind, words in beside)
    return (
        f'<tr class="{row.verdict}"><th scope="row">{escape(row.subject.title)}</th>'
        f'<td class="value">{escape(write_value(row))}</td>'
        f"<td>{'<br>'.join(lines)}</td>"
        f'<td class="{row.verdict}">{escape(write_verdict(row))}</td></tr>'
    )


def _direction(subject: Subject, baseline: Baseline) -> str:
    return "better" if speedup_of(subject, baseline).median >= 1 else "worse"
