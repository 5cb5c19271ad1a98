"""Paired runs and their figures, from rounds with made-up values."""

from __future__ import annotations

import argparse

import pytest

from asynckv.cli.bench.rounds import Case, Round, Sample
from benchmarks.pairing.runs import Figure, Runs, measure_case, report

GIVEN = argparse.Namespace(json=False, only_report=False)


async def runs_of(ours: float, first: float, second: float) -> Runs:
    """Measure a baseline whose second turn differs, round by round to and fro."""
    turns = [Sample(first, 1), Sample(second, 1)]

    async def measure_round() -> Round:
        turns.reverse()
        return Round(Sample(ours, 1), {"raw": (turns[0], turns[1])})

    found = await measure_case("made up", Case(measure_round), runs=2)
    return found["raw"]


async def test_a_figure_is_a_quotient_by_the_mean_of_both_turns() -> None:
    found = await runs_of(3.0, 1.0, 1.0)
    assert found.figure == pytest.approx(3.0)
    assert len(found.runs) == 2


async def test_a_baseline_that_differs_from_itself_counts_for_nothing() -> None:
    found = await runs_of(3.0, 1.0, 1.2)
    assert len(found.runs) == 4 and all(run.is_void for run in found.runs)
    assert not Figure("made up", found.figure, at_least=0.1).is_met


@pytest.mark.parametrize(
    ("figure", "said", "status"),
    [
        (Figure("a", 2.0, at_least=1.0), "met    a: 2.000 >= 1", 0),
        (Figure("a", 2.0, at_most=1.0), "MISSED a: 2.000 <= 1", 1),
        (Figure("a", 2.0), "       a: 2.000", 0),
    ],
)
def test_a_report_says_what_is_met_and_fails_for_a_miss(
    figure: Figure, said: str, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        report([figure], GIVEN)
    assert said in capsys.readouterr().out
    assert ended.value.code == status
