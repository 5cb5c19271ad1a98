"""Paired rounds: each measures every baseline, asynckv, and every baseline again.

What is small takes turns with its baseline every ten calls. So what disturbs the one
disturbs the others, and a baseline is compared with itself in the very rounds that it
is the measure of. From rounds comes a row: ratios round by round, A/A, and whether the
row counts.
"""

from __future__ import annotations

import dataclasses
import itertools
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
    "ROUNDS",
    "Case",
    "CpuClock",
    "Measurement",
    "Round",
    "Sample",
    "a_a_of",
    "judge",
    "measure",
    "measure_between",
    "measure_in_turns",
)


ROUNDS: Final = 6
"""Even, so that each turn of a baseline comes first as often as second."""
_LEAST_ROUNDS = 2
_TURN = 10


@dataclasses.dataclass(frozen=True)
class Sample:
    """One measurement: its value in the row's unit, and what single calls took."""

    value: float
    nbytes: int = 0
    calls: tuple[float, ...] = ()
    cpu_s: float = 0.0


@dataclasses.dataclass(frozen=True)
class Round:
    """One paired round: asynckv between the two turns of each baseline.

    The first baseline decides whether the row is void; against a server that is no
    bench there may be none.
    """

    ours: Sample
    baselines: Mapping[str, tuple[Sample, Sample]]


@dataclasses.dataclass(frozen=True)
class Case:
    """How to measure one round of a subject.

    A cancelled call leaves nothing under way. ``edges`` are those of a histogram over
    single calls, if it has one.
    """

    measure_round: Callable[[], Awaitable[Round]]
    edges: tuple[float, ...] = ()


Measurement = Callable[[], Awaitable[Sample]]
CpuClock = Callable[[], Awaitable[float]]
"""CPU seconds that both processes have used, together."""


async def measure_between(
    ours: Measurement, baselines: Mapping[str, Measurement], cpu: CpuClock
) -> Round:
    """Measure every baseline, asynckv, and every baseline again, the last one first."""

    async def metered(measurement: Measurement) -> Sample:
        before_s = await cpu()
        sample = await measurement()
        return dataclasses.replace(sample, cpu_s=await cpu() - before_s)

    names = list(baselines)
    before = {name: await metered(baselines[name]) for name in names}
    found = await metered(ours)
    after = {name: await metered(baselines[name]) for name in reversed(names)}
    return Round(found, {name: (before[name], after[name]) for name in names})


async def measure_in_turns(
    calls: int,
    ours: Callable[[], Awaitable[object]],
    baselines: Mapping[str, Callable[[], Awaitable[object]]],
    sample: Callable[[Sequence[float]], Sample],
) -> Round:
    """Make so many calls, ten of a baseline before each ten and after the last ones.

    Both find the processor, awake or not, and its caches as the other leaves them. Of
    the baseline's turns every other one is its first, and ``sample`` makes the seconds
    of single calls one measurement.
    """
    taken: list[float] = []
    beside = {name: (list[float](), list[float]()) for name in baselines}
    for number in itertools.count():
        for name, call in baselines.items():
            await _timed(_TURN, call, beside[name][number % 2])
        if len(taken) >= calls:
            break
        await _timed(min(_TURN, calls - len(taken)), ours, taken)
    pairs = {name: (sample(one), sample(two)) for name, (one, two) in beside.items()}
    return Round(sample(taken), pairs)


async def _timed(
    count: int, call: Callable[[], Awaitable[object]], taken: list[float]
) -> None:
    for _ in range(count):
        began_s = time.perf_counter()
        await call()
        taken.append(time.perf_counter() - began_s)


async def measure(
    case: Case,
    rounds: int,
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
        found.append(await case.measure_round())
    return found[1:]  # the first touches new memory


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


def _baseline(name: str, rounds: Sequence[Round], edges: Sequence[float]) -> Baseline:
    pairs = [one.baselines[name] for one in rounds]
    # Between the two turns of the baseline a steady drift cancels out.
    ratios = [
        one.ours.value * 2 / (first.value + second.value)
        for one, (first, second) in zip(rounds, pairs, strict=True)
    ]
    second_turn = [second.value / first.value for first, second in pairs]
    a_a = a_a_of(second_turn)
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


def a_a_of(second_turns: Sequence[float]) -> float:
    """Return the baseline over itself, of quotients of its second and first turns.

    Every other one is turned upside down: what only a turn's place does is no
    difference of the baseline from itself.
    """
    return _middle(
        one if number % 2 else 1 / one for number, one in enumerate(second_turns)
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
