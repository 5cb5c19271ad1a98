"""From turns to rows: ratios iteration by iteration, A/A, and what is void.

Pure functions of numbers. Every ratio is of speeds: above 1 the first is faster.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Final

from asynckv.cli.bench.report import Spread, percentile, spread_of
from benchmarks.peers.report import Contended, Lag, Row
from benchmarks.peers.work import Work

__all__ = (
    "AGAIN",
    "A_A_BOUNDS",
    "PEER",
    "RAW",
    "Turn",
    "in_turns",
    "lag_of",
    "row_of",
)

A_A_BOUNDS: Final = (0.85, 1.15)
RAW: Final = "raw TCP"
AGAIN: Final = "raw TCP again"
PEER: Final = "peer"


@dataclasses.dataclass(frozen=True)
class Turn:
    """What one pull took, and how much CPU both processes together."""

    elapsed_s: float
    cpu_s: float = 0.0


def in_turns(names: Sequence[str], iteration: int) -> list[str]:
    """Return who comes when: the baseline first and last, the others to and fro.

    >>> in_turns(["a", "b"], 0), in_turns(["a", "b"], 1)
    (['raw TCP', 'a', 'b', 'raw TCP again'], ['raw TCP', 'b', 'a', 'raw TCP again'])
    """
    middle = list(names) if iteration % 2 == 0 else list(reversed(names))
    return [RAW, *middle, AGAIN]


def row_of(work: Work, iterations: Sequence[Mapping[str, Turn]]) -> Row:
    """Return what the iterations of one work add up to.

    Each maps the names of :func:`in_turns` to their turns.

    :raises ValueError: there are no iterations
    """
    if not iterations:
        raise ValueError("no iterations, no row")
    merged = [_with_mean_raw(one) for one in iterations]
    names = list(merged[0])
    beside = [name for name in names if name not in (RAW, PEER, "memcpy")]
    ratios = {f"{name} / {PEER}": _ratio(merged, name, PEER) for name in beside}
    ratios |= {f"{name} / {RAW}": _ratio(merged, name, RAW) for name in (*beside, PEER)}
    a_a = _a_a(iterations)
    low, high = A_A_BOUNDS
    is_void = not low <= a_a <= high
    return Row(
        work.name,
        work.title,
        verdict="void" if is_void else "ok",
        reason=f"A/A {a_a:.3f} outside {low}-{high}" if is_void else "",
        iterations=len(iterations),
        contenders={name: _contended(work, merged, name) for name in names},
        ratios=ratios,
        a_a=a_a,
    )


def lag_of(lags_ms: Sequence[float]) -> Lag:
    """Return how late a ticker was.

    :raises ValueError: it never ticked
    """
    return Lag(len(lags_ms), percentile(lags_ms, 0.99), max(lags_ms))


def _with_mean_raw(iteration: Mapping[str, Turn]) -> dict[str, Turn]:
    """Between its two turns a steady drift cancels out."""
    first, second = iteration[RAW], iteration[AGAIN]
    mean = Turn(
        (first.elapsed_s + second.elapsed_s) / 2, (first.cpu_s + second.cpu_s) / 2
    )
    others = {name: turn for name, turn in iteration.items() if name != AGAIN}
    return {**others, RAW: mean}


def _ratio(iterations: Sequence[Mapping[str, Turn]], ours: str, other: str) -> Spread:
    return spread_of([one[other].elapsed_s / one[ours].elapsed_s for one in iterations])


def _a_a(iterations: Sequence[Mapping[str, Turn]]) -> float:
    """The baseline over itself; which turn is divided by which changes each time.

    So what only a turn's place does is not taken for a difference.
    """
    quotients = [one[AGAIN].elapsed_s / one[RAW].elapsed_s for one in iterations]
    logs = [
        math.log(quotient) * (1 if number % 2 else -1)
        for number, quotient in enumerate(quotients)
    ]
    return math.exp(statistics.median(logs))


def _contended(
    work: Work, iterations: Sequence[Mapping[str, Turn]], name: str
) -> Contended:
    turns = [one[name] for one in iterations]
    cpu_s = sum(turn.cpu_s for turn in turns)
    return Contended(
        elapsed_us=spread_of([turn.elapsed_s * 1e6 for turn in turns]),
        gb_per_s=spread_of([work.total / turn.elapsed_s / 1e9 for turn in turns]),
        cpu_s_per_gb=cpu_s / (work.total * len(turns)) * 1e9,
    )
