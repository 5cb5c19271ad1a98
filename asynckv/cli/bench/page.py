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
    Histogram,
    Percentiles,
    Row,
    Spread,
)
from asynckv.cli.bench.wording import (
    speedup_of,
    write_bin,
    write_comparison,
    write_cpu,
    write_machine,
    write_nbytes,
    write_number,
    write_run,
    write_summary,
    write_value,
    write_verdict,
)
from asynckv.cli.document import (
    draw_line,
    draw_rect,
    draw_text,
    picture_of,
    write_document,
)

__all__ = (
    "Bars",
    "Line",
    "Point",
    "draw_histograms",
    "draw_lines",
    "lag_bars",
    "latency_lines",
    "render_page",
    "throughput_lines",
)


@dataclasses.dataclass(frozen=True)
class Point:
    """One value over ``x``; the whisker is its spread."""

    x: float
    value: Spread
    is_sure: bool


@dataclasses.dataclass(frozen=True)
class Line:
    """Points of one contender; ``kind`` is a class of the page's style."""

    name: str
    kind: str
    points: Sequence[Point]


@dataclasses.dataclass(frozen=True)
class Bars:
    """The histogram of one contender."""

    name: str
    kind: str
    histogram: Histogram


def throughput_lines(report: BenchReport) -> list[Line]:
    """Return asynckv, raw TCP and memcpy over the bytes of an entry."""
    rows = sorted(
        (row for row in report.rows if row.subject.group == "throughput" and row.ours),
        key=_nbytes,
    )
    return [
        Line("asynckv", "ours", [_our_point(row) for row in rows]),
        Line("raw TCP", "raw", list(_beside(rows, "raw TCP"))),
        Line("memcpy", "copy", list(_beside(rows, "memcpy"))),
    ]


def latency_lines(report: BenchReport) -> list[Line]:
    """Return p50 and p99 of single requests in ms, over how many are outstanding."""
    rows = [row for row in report.rows if row.subject.group == "concurrency"]
    ours: list[tuple[Row, Percentiles]] = []
    bare: list[tuple[Row, Percentiles]] = []
    for row in rows:
        if row.ours and row.ours.calls:
            ours.append((row, row.ours.calls))
        bare += [(row, b.measured.calls) for b in row.baselines if b.measured.calls]
    lines = []
    for name, kind, found in (("asynckv", "ours", ours), ("streams", "raw", bare)):
        medians = [_call_point(row, calls.p50) for row, calls in found]
        tails = [_call_point(row, calls.p99) for row, calls in found]
        lines += [
            Line(f"{name}, p50", kind, medians),
            Line(f"{name}, p99", f"{kind} thin", tails),
        ]
    return lines


def lag_bars(report: BenchReport) -> list[Bars]:
    """Return how late the loop was, busy and idle."""
    found = []
    for row in report.rows:
        if row.subject.group == "lag" and row.ours and row.ours.histogram:
            found.append(Bars("while payload moves", "ours", row.ours.histogram))
            found += [
                Bars(baseline.name, "raw", baseline.measured.histogram)
                for baseline in row.baselines
                if baseline.measured.histogram
            ]
    return found


def _nbytes(row: Row) -> int:
    return row.subject.parts * row.subject.part_nbytes


def _our_point(row: Row) -> Point:
    value = row.ours.value if row.ours else Spread(0, 0, 0)
    return Point(_nbytes(row), value, row.verdict == "ok")


def _beside(rows: Sequence[Row], kind: str) -> Iterator[Point]:
    for row in rows:
        if (found := _first_of(row, kind)) is not None:
            yield Point(_nbytes(row), found.measured.value, not found.is_void)


def _first_of(row: Row, kind: str) -> Baseline | None:
    """The first baseline of a kind: the one with as many streams as there are lanes."""
    return next((b for b in row.baselines if b.name.startswith(kind)), None)


def _call_point(row: Row, value_us: float) -> Point:
    value = value_us / 1e3
    return Point(
        row.subject.outstanding, Spread(value, value, value), row.verdict == "ok"
    )


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
    parts = [
        draw_text("tick", 0, 14, f"{unit} (log scale)", "start", dx=-66),
        *_y_grid(y),
    ]
    parts.append(draw_text("tick", 100, _HEIGHT - 6, f"{x_title} (log scale)", "end"))
    for place in sorted({point.x for point in points}):
        words = write_x(place)
        parts.append(
            draw_text("tick", x.place(place), _HEIGHT - _BOTTOM + 18, words, "middle")
        )
    for line in lines:
        parts += _draw_line(line, x, y, unit)
    return picture_of(_HEIGHT, title, parts)


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
        parts.append(draw_line("grid", (0, at), (100, at)))
        parts.append(draw_text("tick", 0, at + 4, write_number(value), "end", dx=-10))
    return parts


def _draw_line(line: Line, x: _Axis, y: _Axis, unit: str) -> list[str]:
    places = [(x.place(p.x), y.place(p.value.median)) for p in line.points]
    parts = [
        draw_line(line.kind, one, next_) for one, next_ in itertools.pairwise(places)
    ]
    for (left, top), point in zip(places, line.points, strict=True):
        low, high = y.place(point.value.least), y.place(point.value.most)
        sure = " sure" if point.is_sure else ""
        hint = f"{line.name}: {write_number(point.value.median)} {unit}"
        hint += "" if point.is_sure else " (void)"
        parts.append(draw_line(f"{line.kind} whisker", (left, low), (left, high)))
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
    parts = [draw_text("tick", 0, 14, "share of all ticks", "start", dx=-66)]
    parts += [part for share in (0.0, 0.25, 0.5, 0.75, 1.0) for part in _share(share)]
    step = 100 / (len(edges) - 1)
    for index in range(len(edges) - 1):
        left = index * step
        # Every other label is lower: so they fit in a narrow window.
        at = _HEIGHT - _BOTTOM + 18 + 14 * (index % 2)
        parts.append(
            draw_text("tick", left + step / 2, at, write_bin(edges, index), "middle")
        )
        parts += _draw_bars(all_bars, index, left, step)
    parts.append(draw_text("tick", 100, _HEIGHT - 4, f"{unit} late", "end"))
    return picture_of(_HEIGHT, title, parts)


def _share(share: float) -> list[str]:
    at = _share_place(share)
    return [
        draw_line("grid", (0, at), (100, at)),
        draw_text("tick", 0, at + 4, f"{share:.0%}", "end", dx=-10),
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
        hint = f"{bars.name}: {count:,} of {total:,}"
        x, y = left + step * 0.1 + number * width, _share_place(0.0) - height
        parts.append(draw_rect(bars.kind, x, y, width, height, hint))
    return parts


_NOT_DRAWN = '<p class="note">Nothing was measured that could be drawn here.</p>'


def render_page(report: BenchReport) -> str:
    """Return the whole page as text."""
    parts = (_head, _throughput, _latency, _lag, _table, _foot)
    body = "\n".join(part(report) for part in parts)
    return write_document("asynckv bench", __package__, body)


def _head(report: BenchReport) -> str:
    facts = f"{write_run(report)} · {write_machine(report)}"
    return (
        f'<h1>asynckv bench</h1>\n<p class="facts">{escape(facts)}</p>\n'
        f'<p class="summary" id="summary">{escape(write_summary(report))}</p>\n'
        '<p class="note">Every figure was measured in rounds, each between two turns '
        "of its baseline. Read the comparisons: absolute figures drift. Void rows, and "
        "hollow points, do not count: the baseline did not agree with itself, or the "
        "rounds not with each other.</p>"
    )


def _key(*entries: tuple[str, str]) -> str:
    items = "".join(
        f'<li style="--swatch: var(--{kind})">{escape(name)}</li>'
        for name, kind in entries
    )
    return f'<ul class="key">{items}</ul>'


def _throughput(report: BenchReport) -> str:
    title = "Throughput against size"
    lines = throughput_lines(report)
    key = _key(*((line.name, line.kind) for line in lines))
    drawn = draw_lines(
        title, lines, "GB/s", lambda x: write_nbytes(int(x)), "bytes of an entry"
    )
    note = (
        '<p class="note">Higher is better. An entry is found, lent, moved and '
        "acknowledged: for a small one that takes longer than its bytes do.</p>"
    )
    return f"<h2>{title}</h2>\n{note}{key}\n{drawn or _NOT_DRAWN}"


def _latency(report: BenchReport) -> str:
    key = _key(("asynckv", "ours"), ("bare asyncio streams", "raw"))
    title = "Latency against outstanding requests"
    drawn = draw_lines(
        title,
        latency_lines(report),
        "ms",
        lambda x: f"{x:,.0f}",
        "requests outstanding",
    )
    note = (
        '<p class="note">Lower is better. Half of the requests took less than the line '
        "(p50), 99% less than the dashed line (p99).</p>"
    )
    return f"<h2>{title}</h2>\n{note}{key}\n{drawn or _NOT_DRAWN}"


def _lag(report: BenchReport) -> str:
    found = lag_bars(report)
    key = _key(*((bars.name, bars.kind) for bars in found))
    drawn = draw_histograms("Loop lag", found, "ms")
    note = (
        '<p class="note">How late the event loop ran what was due every 1 ms. Further '
        "left is better.</p>"
    )
    return f"<h2>Loop lag</h2>\n{note}{key}\n{drawn or _NOT_DRAWN}"


def _table(report: BenchReport) -> str:
    rows = "\n".join(_table_row(row) for row in report.rows)
    head = "".join(
        f"<th>{name}</th>"
        for name in ("case", "asynckv", "beside, in the same rounds", "")
    )
    return (
        '<h2>All rows</h2>\n<p class="note">Medians of the rounds [least-most].</p>\n'
        f'<table id="rows"><thead><tr>{head}</tr></thead>\n'
        f"<tbody>\n{rows}\n</tbody></table>"
    )


def _table_row(row: Row) -> str:
    beside = [
        f'<span class="{_direction(row, one)}">'
        f"{escape(write_comparison(row.subject, one))}</span>"
        for one in row.baselines
    ]
    if cpu := write_cpu(row):
        beside.append(f'<span class="cpu">{escape(cpu)}</span>')
    return (
        f'<tr class="{row.verdict}"><th scope="row">{escape(row.subject.title)}</th>'
        f'<td class="value">{escape(write_value(row))}</td>'
        f"<td>{'<br>'.join(beside)}</td>"
        f'<td class="{row.verdict}">{escape(write_verdict(row))}</td></tr>'
    )


def _direction(row: Row, baseline: Baseline) -> str:
    return "better" if speedup_of(row.subject, baseline).median >= 1 else "worse"


def _foot(report: BenchReport) -> str:
    rounds = max((row.rounds for row in report.rows), default=0)
    return (
        f"<footer>Written by <code>asynckv bench</code> after {report.seconds:.0f} s, "
        f"{rounds} rounds a case.</footer>"
    )
