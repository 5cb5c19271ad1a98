"""What was measured of one peer: values only, as JSON keeps them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

from asynckv.cli.bench.report import Spread

__all__ = ("Contended", "Lag", "Machine", "PeerReport", "Row")


class Contended(msgspec.Struct, frozen=True):
    """One contender of a row, over its iterations."""

    elapsed_us: Spread
    gb_per_s: Spread
    cpu_s_per_gb: float
    """Of both processes together."""


class Row(msgspec.Struct, frozen=True):
    """One work. ``void``: the baseline did not agree with itself.

    ``ratios`` are of speeds, by their names ``A / B``: above 1, A is faster.
    """

    work: str
    title: str
    verdict: Literal["ok", "void", "failed"]
    reason: str = ""
    iterations: int = 0
    contenders: Mapping[str, Contended] = {}
    ratios: Mapping[str, Spread] = {}
    a_a: float = 0.0


class Lag(msgspec.Struct, frozen=True):
    """How late a ticker of 1 ms was on the event loop, in milliseconds."""

    ticks: int
    p99_ms: float
    most_ms: float


class Machine(msgspec.Struct, frozen=True):
    """Where it ran, in words that name nobody."""

    cores: int
    python: str
    torch: str
    load_before: float


class PeerReport(msgspec.Struct, frozen=True):
    """Everything one run measured of one peer, or why it measured nothing more.

    ``lags`` while layers move back to back; of whom blocks, its thread does.
    ``idle_cpu`` is the share of a core that the peer's processes take while
    nobody asks.
    """

    peer: str
    how: str = ""
    reason: str = ""
    versions: Mapping[str, str] = {}
    began: str = ""
    seconds: float = 0.0
    quick: bool = False
    machine: Machine | None = None
    ours: str = ""
    rows: tuple[Row, ...] = ()
    lags: Mapping[str, Lag] = {}
    idle_cpu: float | None = None
