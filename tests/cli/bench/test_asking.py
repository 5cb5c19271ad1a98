from __future__ import annotations

from collections.abc import Awaitable, Callable

from asynckv.cli.bench.cases import open_outstanding, open_pairs, open_ping
from asynckv.cli.bench.report import Subject
from asynckv.cli.bench.rig import Rig
from asynckv.cli.bench.rounds import Case

Counter = Callable[[], Awaitable[int]]


async def calls_of(case: Case) -> list[int]:
    """How many calls each contender timed, asynckv first."""
    if case.together is None:
        samples = [await case.ours()]
        samples += [await one() for one in case.baselines.values()]
    else:
        found = await case.together()
        samples = [
            found.ours,
            *(one for pair in found.baselines.values() for one in pair),
        ]
    assert min(sample.value for sample in samples) > 0
    return [len(sample.calls) for sample in samples]


async def test_a_ping_takes_as_many_entries_as_it_times(
    rig: Rig, any_left: Counter
) -> None:
    subject = Subject("ping", "ping", "latency", "us", False, 64)
    async with open_ping(rig, subject, 25) as case:
        assert await calls_of(case) == [25, 20, 20]
        assert (await case.ours()).value > 0
    assert await any_left() == 0


async def test_as_many_requests_are_made_whatever_is_outstanding(
    rig: Rig, any_left: Counter
) -> None:
    for outstanding in (1, 3, 100):
        subject = Subject(
            "n", "n", "concurrency", "requests/s", True, 100, outstanding=outstanding
        )
        async with open_outstanding(rig, subject, 7) as case:
            assert await calls_of(case) == [7, 7]
    assert await any_left() == 0


async def test_a_server_that_is_no_bench_is_asked_with_nothing_beside_it(
    plain_rig: Rig,
) -> None:
    subject = Subject("ping", "ping", "latency", "us", False, 64)
    async with open_ping(plain_rig, subject, 5) as case:
        assert await calls_of(case) == [5]
    async with open_outstanding(plain_rig, subject, 5) as case:
        assert await calls_of(case) == [5]
    assert await plain_rig.lookup.peek(plain_rig.prefix) == 0


async def test_a_pair_is_measured_beside_two_echoes(
    rig: Rig, any_left: Counter
) -> None:
    subject = Subject("pairs", "pairs", "rate", "pairs/s", True, 64)
    async with open_pairs(rig, subject, 4) as case:
        assert await calls_of(case) == [4, 10, 10]
    assert await any_left() == 0


async def test_a_server_that_is_no_bench_takes_pairs_too(plain_rig: Rig) -> None:
    subject = Subject("pairs", "pairs", "rate", "pairs/s", True, 64)
    async with open_pairs(plain_rig, subject, 4) as case:
        assert await calls_of(case) == [4]
