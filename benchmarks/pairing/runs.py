"""Paired runs: asynckv beside baselines in turns, divided by the baseline's A/A.

A run is a few rounds of baseline, asynckv, baseline. The quotient of the two turns of
the baseline is its A/A; a run whose A/A is outside 0.85 to 1.15 is void. The figure is
the median over the runs that count.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NoReturn

from asynckv.cli.bench.rounds import (
    A_A_BOUNDS,
    Case,
    CpuClock,
    Measurement,
    Round,
    Sample,
    a_a_of,
    measure,
    measure_between,
)

__all__ = (
    "Figure",
    "Run",
    "Runs",
    "arguments_of",
    "figures_of",
    "measure_case",
    "measure_runs",
    "ratio_of",
    "report",
)


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
    """All runs of one case beside one baseline, the void ones too."""

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
            f"{self.title}: {self.figure:.2f} {spread} of it, "
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
        limits = ((">=", self.at_least), ("<=", self.at_most))
        said = [f" {sign} {limit:,.4g}" for sign, limit in limits if limit is not None]
        verdict = "" if not said else "met" if self.is_met else "MISSED"
        return f"{verdict:7}{self.what}: {self.found:,.3f}{''.join(said)}"


async def measure_runs(
    title: str,
    ours: Measurement,
    beside: Mapping[str, Measurement],
    cpu: CpuClock,
    *,
    runs: int,
    rounds: int = 4,
) -> Mapping[str, Runs]:
    """Measure until ``runs`` runs count, or twice as many were made."""
    case = Case(lambda: measure_between(ours, beside, cpu))
    return await measure_case(title, case, runs=runs, rounds=rounds)


async def measure_case(
    title: str, case: Case, *, runs: int, rounds: int = 4, beside: str = ""
) -> Mapping[str, Runs]:
    """As :func:`measure_runs`. The first baseline says which count, or ``beside``."""
    found: dict[str, list[Run]] = {}
    made = counted = 0
    while counted < runs and made < 2 * runs:
        measured = await measure(case, rounds, lambda _: None)
        for name in measured[0].baselines:
            found.setdefault(name, []).append(_run(measured, name))
        judged = found[beside or next(iter(found))][-1]
        made, counted = made + 1, counted + (not judged.is_void)
    results = {name: Runs(f"{title} / {name}", of) for name, of in found.items()}
    print(*results.values(), sep="\n", flush=True)
    return results


def _run(rounds: Sequence[Round], name: str) -> Run:
    pairs = [one.baselines[name] for one in rounds]
    means = [(first.value + second.value) / 2 for first, second in pairs]
    ratios = [one.ours.value / mean for one, mean in zip(rounds, means, strict=True)]
    a_a = a_a_of([second.value / first.value for first, second in pairs])
    ours_cpu = _cpu_s_per_gb([one.ours for one in rounds])
    baseline_cpu = _cpu_s_per_gb([sample for pair in pairs for sample in pair])
    return Run(
        figure=statistics.median(ratios) / a_a,
        a_a=a_a,
        ours=statistics.median(one.ours.value for one in rounds),
        baseline=statistics.median(means),
        cpu_ratio=ours_cpu / baseline_cpu if baseline_cpu else math.nan,
        cpu_s_per_gb=ours_cpu,
    )


def _cpu_s_per_gb(samples: Sequence[Sample]) -> float:
    nbytes = sum(sample.nbytes for sample in samples)
    cpu_s = sum(sample.cpu_s for sample in samples)
    return cpu_s / nbytes * 1e9 if nbytes else 0.0


def ratio_of(some: Sequence[float], others: Sequence[float]) -> float:
    """Return the median of each divided by its neighbour."""
    return statistics.median(a / b for a, b in zip(some, others, strict=True))


def arguments_of(
    doc: str | None, only: Collection[str] = (), **defaults: object
) -> argparse.ArgumentParser:
    """Return what reads ``--only``, if there is a choice, options and how to report."""
    parser = argparse.ArgumentParser(description=(doc or "").split("\n")[0])
    if only:
        parser.add_argument("--only", nargs="+", choices=only, default=list(only))
    for name, default in defaults.items():
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(option, type=type(default), default=default)
    parser.add_argument("--only-report", action="store_true", help="a miss is no error")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def figures_of(name: str, values: Mapping[str, float]) -> list[Figure]:
    """Return what is only said."""
    return [Figure(f"{name}: {what}", value) for what, value in values.items()]


def report(figures: Sequence[Figure], given: argparse.Namespace) -> NoReturn:
    """Print what was met and what was not; exit 1 for a miss.

    :raises SystemExit: always
    """
    missed = sum(not figure.is_met for figure in figures)
    if given.json:
        rows = [dataclasses.asdict(one) | {"is_met": one.is_met} for one in figures]
        print(json.dumps(rows))
    else:
        print(*["", *figures], sep="\n")
        print(f"{missed} of {len(figures)} figures miss their limits")
    raise SystemExit(bool(missed) and not given.only_report)
