"""What is drawn of a report: the same curves on the page and in the picture."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from asynckv.cli.bench.figures import Histogram, Percentiles, Spread
from asynckv.cli.bench.report import Baseline, BenchReport, Row

__all__ = (
    "Bars",
    "Line",
    "Point",
    "lag_bars",
    "latency_lines",
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
