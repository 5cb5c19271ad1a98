from __future__ import annotations

from collections.abc import Sequence

import pytest

from asynckv.cli.bench.report import Spread, Subject
from asynckv.cli.bench.rounds import (
    Case,
    Measurement,
    Round,
    Sample,
    judge,
    measure,
    measure_between,
    measure_in_turns,
)


def noting(name: str, order: list[str]) -> Measurement:
    async def measurement() -> Sample:
        order.append(name)
        return Sample(float(len(order)))

    return measurement


def no_progress(rounds: int) -> None:
    pass


async def no_cpu() -> float:
    return 0.0


def case_of(ours: Measurement, **baselines: Measurement) -> Case:
    return Case(lambda: measure_between(ours, baselines, no_cpu))


async def test_asynckv_is_measured_between_two_turns_of_each_baseline() -> None:
    order: list[str] = []
    case = case_of(
        noting("ours", order), raw=noting("raw", order), copy=noting("copy", order)
    )
    await measure(case, 0, no_progress)
    assert order == ["raw", "copy", "ours", "copy", "raw"]


async def test_the_first_round_does_not_count() -> None:
    order: list[str] = []
    case = case_of(noting("ours", order), raw=noting("raw", order))
    rounds = await measure(case, 2, no_progress)
    assert [one.ours.value for one in rounds] == [5.0, 8.0]
    first, second = rounds[0].baselines["raw"]
    assert (first.value, second.value) == (4.0, 6.0)


async def test_for_so_many_seconds_rounds_are_even_and_at_least_two() -> None:
    now = [0.0]
    told: list[int] = []

    async def slow() -> Sample:
        now[0] += 2.0
        return Sample(1.0)

    async def rounds_in(seconds: float) -> int:
        found = await measure(
            case_of(slow), 99, told.append, seconds=seconds, clock=lambda: now[0]
        )
        return len(found)

    assert [await rounds_in(seconds) for seconds in (0.1, 7.0)] == [2, 4]
    assert told[3:] == [0, 2, 4, 6, 8]


async def test_each_measurement_is_charged_its_own_cpu() -> None:
    clock = [0.0]

    async def cpu() -> float:
        return clock[0]

    async def busy() -> Sample:
        clock[0] += 2.0
        return Sample(1.0)

    only = await measure_between(busy, {"raw": noting("raw", [])}, cpu)
    assert (only.ours.cpu_s, only.baselines["raw"][0].cpu_s) == (2.0, 0.0)


async def test_progress_is_told_between_rounds() -> None:
    told: list[int] = []
    await measure(case_of(noting("ours", [])), 3, told.append)
    assert told == [0, 1, 2, 3]


@pytest.mark.parametrize("is_alone", [False, True])
async def test_calls_take_turns_and_the_baseline_is_first_and_last(
    is_alone: bool,
) -> None:
    order: list[str] = []
    bare = {} if is_alone else {"bare": noting("b", order)}

    def count(calls: Sequence[float]) -> Sample:
        return Sample(len(calls))

    found = await measure_in_turns(25, noting("o", order), bare, count)
    beside = "" if is_alone else "b" * 10
    assert "".join(order) == f"{beside}{'o' * 10}" * 2 + f"{beside}ooooo{beside}"
    pairs = {} if is_alone else {"bare": (Sample(20), Sample(20))}
    assert found == Round(Sample(25), pairs)


SUBJECT = Subject("entry", "an entry", "throughput", "GB/s", True, 1000)


def round_of(ours: float, first: float, second: float) -> Round:
    raw = (Sample(first, 1000, cpu_s=2e-6), Sample(second, 1000, cpu_s=2e-6))
    copied = (Sample(8.0), Sample(2.0))
    mine = Sample(ours, 1000, (1.0, 3.0), 1e-6)
    return Round(mine, {"raw TCP": raw, "memcpy": copied})


def test_a_ratio_is_of_its_own_round_between_both_turns_of_the_baseline() -> None:
    rounds = [round_of(1.0, 1.0, 1.0), round_of(2.0, 3.0, 5.0), round_of(3.0, 1.0, 1.0)]
    row = judge(SUBJECT, rounds)
    assert row.baselines[0].ratio == Spread(1.0, 0.5, 3.0)
    assert row.ours is not None
    assert row.ours.value == Spread(2.0, 1.0, 3.0)


def test_cpu_is_counted_in_seconds_a_gigabyte() -> None:
    row = judge(SUBJECT, [round_of(1.0, 1.0, 1.0)])
    assert row.ours is not None
    assert row.ours.cpu_s_per_gb == pytest.approx(1.0)
    assert row.baselines[0].measured.cpu_s_per_gb == pytest.approx(2.0)
    assert row.baselines[1].measured.cpu_s_per_gb is None


@pytest.mark.parametrize(
    ("first", "verdict"), [(0.86, "ok"), (1.14, "ok"), (0.84, "void"), (1.16, "void")]
)
def test_a_row_whose_baseline_differs_from_itself_is_void(
    first: float, verdict: str
) -> None:
    # Whichever turn comes first, one of the two is always less.
    rounds = [round_of(1.0, first, 1.0), round_of(1.0, 1.0, first)] * 3
    row = judge(SUBJECT, rounds)
    assert row.verdict == verdict
    assert bool(row.reason) == (verdict == "void")


def test_what_a_turn_s_place_does_is_no_difference_from_itself() -> None:
    row = judge(SUBJECT, [round_of(1.0, 1.0, 0.5)] * 6)
    raw = row.baselines[0]
    assert row.verdict == "ok"
    assert raw.a_a == pytest.approx(1.0)
    assert raw.second_turn == pytest.approx(0.5)


def test_another_baseline_may_be_void_without_the_row() -> None:
    row = judge(SUBJECT, [round_of(1.0, 1.0, 1.0)])
    assert (row.verdict, row.baselines[1].is_void) == ("ok", True)


def test_only_cases_with_edges_have_a_histogram() -> None:
    rounds = [round_of(1.0, 1.0, 1.0)]
    with_edges = judge(SUBJECT, rounds, (0.0, 2.0, 4.0)).ours
    without = judge(SUBJECT, rounds).ours
    assert with_edges is not None and with_edges.histogram is not None
    assert with_edges.histogram.counts == (1, 1)
    assert without is not None and without.histogram is None


@pytest.mark.parametrize(("last", "verdict"), [(2.9, "ok"), (3.1, "void")])
def test_a_row_whose_rounds_differ_too_much_from_each_other_is_void(
    last: float, verdict: str
) -> None:
    row = judge(SUBJECT, [round_of(1.0, 1.0, 1.0), round_of(last, 1.0, 1.0)])
    assert row.verdict == verdict
    assert ("rounds differ by a factor of 3.1" in row.reason) == (verdict == "void")


def test_rounds_may_differ_as_long_as_the_baseline_does_likewise() -> None:
    rounds = [round_of(1.0, 1.0, 1.0), round_of(9.0, 9.0, 9.0)]
    assert judge(SUBJECT, rounds).verdict == "ok"


def test_a_row_without_a_baseline_is_judged_by_its_own_rounds() -> None:
    steady = [Round(Sample(value), {}) for value in (1.0, 2.0)]
    assert judge(SUBJECT, steady).verdict == "ok"
    assert judge(SUBJECT, [*steady, Round(Sample(9.0), {})]).verdict == "void"
