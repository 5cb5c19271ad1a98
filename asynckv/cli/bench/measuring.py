"""Paired rounds: each measures every baseline, asynckv, and every baseline again.

So what disturbs the one disturbs the others, and a baseline is compared with itself
in the very rounds that it is the measure of.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Awaitable, Callable, Mapping

__all__ = (
    "Case",
    "CpuClock",
    "Measurement",
    "Round",
    "Sample",
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
