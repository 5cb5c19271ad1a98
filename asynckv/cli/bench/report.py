"""What a user chooses for a bench, and what it found: values only.

``--json`` writes the latter, as docs/bench.md describes it: a new field has a default,
and what a field means never changes: else ``FORMAT`` does. With the sums over samples:
medians, percentiles, histograms, pure functions of numbers. Nothing here imports torch,
so that ``--help`` does not either.
"""

from __future__ import annotations

import bisect
import dataclasses
import os
import statistics
from collections.abc import Sequence
from typing import Final, Literal, TypeAlias

import msgspec

from asynckv.cli.process import LoopName
from asynckv.security.tls import TLS

__all__ = (
    "FORMAT",
    "Baseline",
    "BenchReport",
    "DigestName",
    "Group",
    "Histogram",
    "Machine",
    "Measured",
    "Percentiles",
    "Row",
    "Selection",
    "Settings",
    "Spread",
    "Subject",
    "Unit",
    "Verdict",
    "histogram_of",
    "percentile",
    "percentiles_of",
    "spread_of",
)

_START_S = 4.0
_CASE_S, _QUICK_CASE_S = 5.0, 0.4

DigestName: TypeAlias = Literal["auto", "full", "edges", "off"]
"""As ``asynckv.links.options.Digest``, which imports torch."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """Options of the link, as ``serve`` and ``connect`` have them, and the loop."""

    digest: DigestName = "auto"
    lanes: int | None = None
    secret_file: str | os.PathLike[str] | None = None
    tls: TLS | None = None
    allow_plaintext: bool = False
    loop: LoopName = "auto"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Selection:
    """Which cases are measured, and for how long.

    ``cases`` are names or patterns, ``shapes`` are tensors by bytes of each, as
    ``32x2MiB``: one case each, and the only ones where no ``cases`` are named.
    ``seconds`` is how long each case is measured, instead of so many rounds.
    """

    quick: bool = False
    cases: tuple[str, ...] = ()
    shapes: tuple[str, ...] = ()
    seconds: float | None = None

    def about_s(self, cases: int) -> float:
        """About how long so many cases take on an idle machine."""
        each_s = _QUICK_CASE_S if self.quick else _CASE_S
        if self.seconds is not None:
            each_s = self.seconds + 1
        return _START_S + cases * each_s


class Spread(msgspec.Struct, frozen=True):
    """The median of the rounds, and the least and the most of them."""

    median: float
    least: float
    most: float


class Percentiles(msgspec.Struct, frozen=True):
    """Single calls of all rounds together, not medians of rounds."""

    count: int
    p50: float
    p90: float
    p99: float
    most: float


class Histogram(msgspec.Struct, frozen=True):
    """``counts[i]`` values are in ``edges[i] <= value < edges[i + 1]``.

    Values outside are counted in the first and in the last bin.
    """

    edges: tuple[float, ...]
    counts: tuple[int, ...]


def spread_of(values: Sequence[float]) -> Spread:
    """Return median, least and most.

    :raises ValueError: there are no values
    """
    if not values:
        raise ValueError("no values, no spread")
    return Spread(statistics.median(values), min(values), max(values))


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value below which ``share`` of the values are.

    >>> percentile(range(1, 101), 0.99), percentile([7.0], 0.5)
    (100, 7.0)

    :raises ValueError: there are no values
    """
    if not values:
        raise ValueError("no values, no percentile")
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


def percentiles_of(values: Sequence[float]) -> Percentiles:
    """Return the percentiles that a row shows.

    :raises ValueError: there are no values
    """
    p50, p90, p99 = (percentile(values, share) for share in (0.5, 0.9, 0.99))
    return Percentiles(len(values), p50, p90, p99, max(values))


def histogram_of(values: Sequence[float], edges: Sequence[float]) -> Histogram:
    """Count the values between ascending ``edges``."""
    counts = [0] * (len(edges) - 1)
    for value in values:
        place = bisect.bisect_right(edges, value) - 1
        counts[min(max(place, 0), len(counts) - 1)] += 1
    return Histogram(tuple(edges), tuple(counts))


FORMAT: Final = "asynckv-bench/1"

Group = Literal["throughput", "blocks", "latency", "concurrency", "tail", "rate", "lag"]
Unit = Literal["GB/s", "us", "ms", "requests/s", "pairs/s"]
Verdict = Literal["ok", "void", "failed"]


class Subject(msgspec.Struct, frozen=True):
    """What is measured: ``parts`` tensors of ``part_nbytes``, or so many requests."""

    case: str
    title: str
    group: Group
    unit: Unit
    higher_is_better: bool
    part_nbytes: int
    parts: int = 1
    outstanding: int = 1


class Measured(msgspec.Struct, frozen=True):
    """One contender of a row over all rounds.

    ``cpu_s_per_gb`` is of both processes together; ``None`` where no payload to
    speak of moves. ``calls`` are in the row's unit, and in microseconds for rates.
    """

    value: Spread
    cpu_s_per_gb: float | None = None
    calls: Percentiles | None = None
    histogram: Histogram | None = None


class Baseline(msgspec.Struct, frozen=True):
    """What the same rounds measured beside it.

    ``ratio`` is asynckv's value over the baseline's, round by round. ``a_a`` is
    the baseline over itself: of its two turns in a round, the first over the second
    and the second over the first in turns. ``second_turn`` is always the second
    over the first: what a turn's place does, if that is steady.
    """

    name: str
    measured: Measured
    ratio: Spread
    a_a: float
    is_void: bool
    second_turn: float = 1.0


class Row(msgspec.Struct, frozen=True):
    """One case. ``void``: the first baseline did not agree with itself, or the
    rounds not with each other; the ``reason`` says which.

    A row that ``failed`` has its ``reason`` and no figures. One against a server
    that is no bench has no baselines.
    """

    subject: Subject
    verdict: Verdict
    rounds: int = 0
    ours: Measured | None = None
    baselines: tuple[Baseline, ...] = ()
    reason: str = ""


class Machine(msgspec.Struct, frozen=True):
    """Where this side ran, in words that name nobody."""

    system: str
    processor: str
    cores: int
    load_before: float
    python: str
    torch: str
    loop: str


class BenchReport(msgspec.Struct, frozen=True):
    """Everything one run of the bench measured.

    ``is_bench`` is false where a server of the user's own was measured, which has no
    sockets for baselines.
    """

    format: str
    version: str
    began: str
    seconds: float
    quick: bool
    own_server: bool
    scheme: str
    transport: str
    digest: str
    lanes: int
    machine: Machine
    rows: tuple[Row, ...] = ()
    is_bench: bool = True
