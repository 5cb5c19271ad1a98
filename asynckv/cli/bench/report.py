"""What a bench found: values only, as ``--json`` writes them. docs/bench.md has them.

A new field has a default, and what a field means never changes: else ``FORMAT`` does.
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from asynckv.cli.bench.figures import Histogram, Percentiles, Spread

__all__ = (
    "FORMAT",
    "Baseline",
    "BenchReport",
    "Group",
    "Machine",
    "Measured",
    "Row",
    "Subject",
    "Unit",
    "Verdict",
)

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
