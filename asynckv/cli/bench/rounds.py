"""Paired rounds: each measures every baseline, asynckv, and every baseline again.

So what disturbs the one disturbs the others, and a baseline is compared with itself
in the very rounds that it is the measure of. From rounds comes a row: ratios round by
round, A/A, and whether the row counts.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Final

from asynckv.cli.bench.report import (
    Baseline,
    Measured,
    Row,
    Subject,
    histogram_of,
    percentiles_of,
    spread_of,
)
from asynckv.cli.bench.wording import write_void

__all__ = (
    "A_A_BOUNDS",
    "MAX_SPREAD",
    "Case",
    "CpuClock",
    "Measurement",
    "Round",
    "Sample",
    "failed_row",
    "judge",
    "measure",
    "measure_round",
)


_LEAST_ROUNDS = 2


@dataclasses.dataclass(frozen=True)
class Sample:
    """One measurement: its value in the row's unit, and what single calls took."""

    value: float
    nbytes: int = 0
    calls: tuple[float, ...] = ()
    cpu_s: float = 0.0


Measurement = Callable[[], Awaitable[Sample]]
CpuClock = Callable[[], Awaitable[float]]
"""CPU seconds that both processes have used, together."""


@dataclasses.dataclass(frozen=True)
class Case:
    """How to measure one subject once, and each of its baselines once.

    The first baseline decides whether the row is void; against a server that is no
    bench there may be none. ``edges`` are those of a histogram over single calls, if
    it has one. Where single calls take turns, ``together`` measures a round of both.
    """

    ours: Measurement
    baselines: Mapping[str, Measurement]
    edges: tuple[float, ...] = ()
    together: Callable[[], Awaitable[Round]] | None = None


@dataclasses.dataclass(frozen=True)
class Round:
    """One paired round: asynckv between the two turns of each baseline."""

    ours: Sample
    baselines: Mapping[str, tuple[Sample, Sample]]


async def measure_round(case: Case, cpu: CpuClock) -> Round:
    """Measure a case once. A cancelled call leaves nothing under way."""
    if case.together is not None:
        return await case.together()
    before = {
        name: await _metered(baseline, cpu) for name, baseline in case.baselines.items()
    }
    ours = await _metered(case.ours, cpu)
    after = {
        name: await _metered(case.baselines[name], cpu)
        for name in reversed(list(case.baselines))
    }
    return Round(ours, {name: (before[name], after[name]) for name in before})


async def measure(
    case: Case,
    rounds: int,
    cpu: CpuClock,
    done: Callable[[int], None],
    *,
    seconds: float | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> list[Round]:
    """Measure ``rounds`` rounds after one that is not counted, or for ``seconds``.

    In the latter case it is two rounds or a larger even number, until so long has
    passed. ``done`` is called between rounds, with how many are over, or how many
    seconds. A cancelled call leaves nothing under way.
    """
    found: list[Round] = []
    began_s = clock()

    def is_enough() -> bool:
        counted = len(found) - 1
        if seconds is None:
            return counted >= rounds
        is_over = clock() - began_s >= seconds
        return is_over and counted >= _LEAST_ROUNDS and counted % 2 == 0

    while not is_enough():
        done(len(found) if seconds is None else int(clock() - began_s))
        found.append(await measure_round(case, cpu))
    return found[1:]  # the first touches new memory


async def _metered(measurement: Measurement, cpu: CpuClock) -> Sample:
    before_s = await cpu()
    sample = await measurement()
    return dataclasses.replace(sample, cpu_s=await cpu() - before_s)


A_A_BOUNDS: Final = (0.85, 1.15)
"""A baseline that differs more from itself is the measure of nothing."""
MAX_SPREAD: Final = 3.0
"""Rounds that differ by a larger factor among themselves say nothing either."""


def judge(
    subject: Subject, rounds: Sequence[Round], edges: Sequence[float] = ()
) -> Row:
    """Return the row that the rounds add up to.

    It is void where the first baseline did not agree with itself, or the rounds not
    with each other. Without a baseline only the latter is judged.

    :raises ValueError: there are no rounds
    """
    ours = _measured([one.ours for one in rounds], edges)
    names = list(rounds[0].baselines) if rounds else []
    baselines = tuple(_baseline(name, rounds, edges) for name in names)
    reason = _why_void(ours, baselines)
    return Row(
        subject,
        verdict="void" if reason else "ok",
        rounds=len(rounds),
        ours=ours,
        baselines=baselines,
        reason=reason,
    )


def _why_void(ours: Measured, baselines: Sequence[Baseline]) -> str:
    if baselines and baselines[0].is_void:
        return write_void(baselines[0])
    # What slows both down in a round is not in the ratio of the two.
    spread = baselines[0].ratio if baselines else ours.value
    factor = spread.most / max(spread.least, 1e-12)
    if factor > MAX_SPREAD:
        return f"rounds differ by a factor of {factor:.1f}"
    return ""


def failed_row(subject: Subject, reason: str) -> Row:
    """Return the row of a case that could not be measured."""
    return Row(subject, verdict="failed", reason=reason)


def _baseline(name: str, rounds: Sequence[Round], edges: Sequence[float]) -> Baseline:
    pairs = [one.baselines[name] for one in rounds]
    # Between the two turns of the baseline a steady drift cancels out.
    ratios = [
        one.ours.value * 2 / (first.value + second.value)
        for one, (first, second) in zip(rounds, pairs, strict=True)
    ]
    second_turn = [second.value / first.value for first, second in pairs]
    # The turns change places from round to round, so what a turn's place does
    # is no difference of the baseline from itself.
    a_a = _middle(
        one if number % 2 else 1 / one for number, one in enumerate(second_turn)
    )
    samples = [sample for pair in pairs for sample in pair]
    low, high = A_A_BOUNDS
    return Baseline(
        name,
        _measured(samples, edges),
        spread_of(ratios),
        a_a,
        is_void=not low <= a_a <= high,
        second_turn=_middle(second_turn),
    )


def _middle(quotients: Iterable[float]) -> float:
    """The median of quotients: those of b and of 1 / b cancel out."""
    return math.exp(statistics.median(map(math.log, quotients)))


def _measured(samples: Sequence[Sample], edges: Sequence[float]) -> Measured:
    nbytes = sum(sample.nbytes for sample in samples)
    cpu_s = sum(sample.cpu_s for sample in samples)
    calls = [call for sample in samples for call in sample.calls]
    return Measured(
        value=spread_of([sample.value for sample in samples]),
        cpu_s_per_gb=cpu_s / nbytes * 1e9 if nbytes and cpu_s else None,
        calls=percentiles_of(calls) if calls else None,
        histogram=histogram_of(calls, edges) if calls and edges else None,
    )
