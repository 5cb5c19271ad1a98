"""From rounds to a row: ratios round by round, A/A, and whether the row counts."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Final

from asynckv.cli.bench.figures import histogram_of, percentiles_of, spread_of
from asynckv.cli.bench.measuring import Round, Sample
from asynckv.cli.bench.report import Baseline, Measured, Row, Subject
from asynckv.cli.bench.wording import write_void

__all__ = ("A_A_BOUNDS", "MAX_SPREAD", "failed_row", "judge")

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
