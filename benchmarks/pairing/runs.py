"""Paired runs: asynckv beside a baseline in turns, divided by the baseline's A/A.

A run is a few rounds of baseline, asynckv, baseline. The quotient of the two turns of
the baseline is its A/A; a run whose A/A is outside 0.85 to 1.15 is void. The figure is
the median over the runs that count.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Sequence

from asynckv.cli.bench.rounds import (
    A_A_BOUNDS,
    Case,
    CpuClock,
    Measurement,
    Round,
    Sample,
    measure,
    measure_between,
)

__all__ = ("Figure", "Run", "Runs", "measure_case", "measure_runs", "report")


@dataclasses.dataclass(frozen=True)
class Run:
    """One paired run: asynckv over its baseline, already divided by ``a_a``."""

    figure: float
    a_a: float
    ours: float
    baseline: float
    cpu_ratio: float
    cpu_s_per_gb: float

    @property
    def is_void(self) -> bool:
        """Whether the baseline differs too much from itself."""
        low, high = A_A_BOUNDS
        return not low <= self.a_a <= high


@dataclasses.dataclass(frozen=True)
class Runs:
    """All runs of one case, the void ones too."""

    title: str
    runs: Sequence[Run]

    def median(self, of: Callable[[Run], float]) -> float:
        """The median over the runs that count; nan if none does."""
        values = [of(run) for run in self.runs if not run.is_void]
        return statistics.median(values) if values else math.nan

    @property
    def figure(self) -> float:
        """The median of the runs' figures."""
        return self.median(lambda run: run.figure)

    @property
    def cpu_ratio(self) -> float:
        """The median of the quotients of CPU seconds a byte."""
        return self.median(lambda run: run.cpu_ratio)

    def __str__(self) -> str:
        counted = [run.figure for run in self.runs if not run.is_void]
        a_as = ", ".join(f"{run.a_a:.2f}" for run in self.runs)
        spread = f"[{min(counted):.2f}-{max(counted):.2f}]" if counted else "[]"
        return (
            f"{self.title}: {self.figure:.2f} {spread} of the baseline, "
            f"{self.median(lambda run: run.ours):.4g} beside "
            f"{self.median(lambda run: run.baseline):.4g}; "
            f"CPU/GB {self.cpu_ratio:.2f} of it, "
            f"{self.median(lambda run: run.cpu_s_per_gb):.3f} s; "
            f"{len(counted)} of {len(self.runs)} runs count, A/A {a_as}"
        )


@dataclasses.dataclass(frozen=True)
class Figure:
    """What was found, and the limit that it has to keep, if there is one."""

    what: str
    found: float
    at_least: float | None = None
    at_most: float | None = None

    @property
    def is_met(self) -> bool:
        """Whether it keeps its limit; what could not be measured does not."""
        if self.at_least is not None and not self.found >= self.at_least:
            return False
        return self.at_most is None or self.found <= self.at_most

    def __str__(self) -> str:
        if self.at_least is None and self.at_most is None:
            return f"      {self.what}: {self.found:.2f}"
        sign, bound = (
            (">=", self.at_least) if self.at_most is None else ("<=", self.at_most)
        )
        verdict = "met   " if self.is_met else "MISSED"
        return f"{verdict}{self.what}: {self.found:.2f} {sign} {bound:g}"


async def measure_runs(
    title: str,
    ours: Measurement,
    baseline: Measurement,
    cpu: CpuClock,
    *,
    runs: int,
    rounds: int = 4,
) -> Runs:
    """Measure until ``runs`` runs count, or twice as many were made."""
    beside = {"baseline": baseline}
    case = Case(lambda: measure_between(ours, beside, cpu))
    return await measure_case(title, case, runs=runs, rounds=rounds)


async def measure_case(title: str, case: Case, *, runs: int, rounds: int = 4) -> Runs:
    """As :func:`measure_runs`, of a case with one baseline."""
    found: list[Run] = []
    while sum(not run.is_void for run in found) < runs and len(found) < 2 * runs:
        found.append(_run(await measure(case, rounds, lambda _: None)))
    result = Runs(title, found)
    print(result, flush=True)
    return result


def _run(rounds: Sequence[Round]) -> Run:
    pairs = [pair for one in rounds for pair in one.baselines.values()]
    middles = [(first.value + second.value) / 2 for first, second in pairs]
    ratios = [one.ours.value / m for one, m in zip(rounds, middles, strict=True)]
    turns = [math.log(second.value / first.value) for first, second in pairs]
    # Every other one upside down: what a turn's place does is no difference.
    turns = [one if number % 2 else -one for number, one in enumerate(turns)]
    a_a = math.exp(statistics.median(turns))
    ours_cpu = _cpu_s_per_gb([one.ours for one in rounds])
    baseline_cpu = _cpu_s_per_gb([sample for pair in pairs for sample in pair])
    return Run(
        figure=statistics.median(ratios) / a_a,
        a_a=a_a,
        ours=statistics.median(one.ours.value for one in rounds),
        baseline=statistics.median(middles),
        cpu_ratio=ours_cpu / baseline_cpu if baseline_cpu else math.nan,
        cpu_s_per_gb=ours_cpu,
    )


def _cpu_s_per_gb(samples: Sequence[Sample]) -> float:
    nbytes = sum(sample.nbytes for sample in samples)
    cpu_s = sum(sample.cpu_s for sample in samples)
    return cpu_s / nbytes * 1e9 if nbytes else 0.0


def report(figures: Sequence[Figure], *, only_report: bool) -> None:
    """Print what was met and what was not; exit 1 for a miss.

    :raises SystemExit: always
    """
    print()
    for figure in figures:
        print(figure)
    missed = [figure for figure in figures if not figure.is_met]
    print(f"{len(missed)} of {len(figures)} figures miss their limits")
    raise SystemExit(bool(missed) and not only_report)
