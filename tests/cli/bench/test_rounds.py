from __future__ import annotations

from asynckv.cli.bench.rounds import Case, Measurement, Round, Sample, measure


def noting(name: str, order: list[str]) -> Measurement:
    async def measurement() -> Sample:
        order.append(name)
        return Sample(float(len(order)))

    return measurement


def no_progress(rounds: int) -> None:
    pass


async def no_cpu() -> float:
    return 0.0


async def test_asynckv_is_measured_between_two_turns_of_each_baseline() -> None:
    order: list[str] = []
    baselines = {"raw": noting("raw", order), "copy": noting("copy", order)}
    await measure(Case(noting("ours", order), baselines), 0, no_cpu, no_progress)
    assert order == ["raw", "copy", "ours", "copy", "raw"]


async def test_the_first_round_does_not_count() -> None:
    order: list[str] = []
    case = Case(noting("ours", order), {"raw": noting("raw", order)})
    rounds = await measure(case, 2, no_cpu, no_progress)
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
            Case(slow, {}),
            99,
            no_cpu,
            told.append,
            seconds=seconds,
            clock=lambda: now[0],
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

    case = Case(busy, {"raw": noting("raw", [])})
    (only,) = await measure(case, 1, cpu, no_progress)
    assert (only.ours.cpu_s, only.baselines["raw"][0].cpu_s) == (2.0, 0.0)


async def test_progress_is_told_between_rounds() -> None:
    told: list[int] = []
    case = Case(noting("ours", []), {})
    await measure(case, 3, no_cpu, told.append)
    assert told == [0, 1, 2, 3]


async def test_what_takes_turns_is_measured_together() -> None:
    both = Round(Sample(1.0), {"echo": (Sample(2.0), Sample(3.0))})

    async def together() -> Round:
        return both

    case = Case(noting("never", []), {}, together=together)
    assert await measure(case, 2, no_cpu, no_progress) == [both, both]
