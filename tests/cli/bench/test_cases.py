from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from asynckv.cli.bench.baselines import name_of_streams
from asynckv.cli.bench.cases import (
    EDGES_MS,
    open_fetching,
    open_lag,
    open_moving,
    open_outstanding,
    open_pairs,
    open_ping,
    open_tail,
    pull,
    tick,
)
from asynckv.cli.bench.report import Subject
from asynckv.cli.bench.rig import Rig, make_memory
from asynckv.cli.bench.rounds import Case

Counter = Callable[[], Awaitable[int]]
SUBJECT = Subject("small", "small", "blocks", "GB/s", True, 70_000, 3)


@pytest.mark.parametrize("scattered", [False, True])
async def test_every_contender_moves_all_bytes_so_many_times(
    rig: Rig, scattered: bool
) -> None:
    async with open_moving(rig, SUBJECT, repeats=2, scattered=scattered) as case:
        samples = [await case.ours()]
        samples += [await one() for one in case.baselines.values()]
    streams = min(rig.lanes, 1 if scattered else 3)
    raw = [name_of_streams(streams), name_of_streams(1)]
    assert list(case.baselines) == [*dict.fromkeys(raw), "memcpy"]
    assert {sample.nbytes for sample in samples} == {420_000}
    assert min(sample.value for sample in samples) > 0


async def test_a_case_takes_its_entry_away_with_it(rig: Rig, any_left: Counter) -> None:
    async with open_moving(rig, SUBJECT, repeats=1):
        assert await any_left() == 1
    assert await any_left() == 0


async def test_a_server_that_is_no_bench_has_each_entry_taken_for_good(
    plain_rig: Rig,
) -> None:
    async with open_moving(plain_rig, SUBJECT, repeats=7) as case:
        assert list(case.baselines) == ["memcpy"]
        assert (await case.ours()).nbytes == 7 * 210_000
    async with open_fetching(plain_rig, SUBJECT, 3) as case:
        assert (len((await case.ours()).calls), case.baselines) == (3, {})
    assert await plain_rig.lookup.peek(plain_rig.prefix) == 0


async def test_a_pull_lands_in_the_memory_and_leaves_the_entry(rig: Rig) -> None:
    memory = make_memory(2, 100_000)
    await rig.lookup.insert([7], None, memory.layers, None, None)
    memory.poison()
    for _ in range(3):
        assert await pull(rig.lookup, [7], memory) > 0
    memory.check()


async def test_each_fetch_is_timed(rig: Rig) -> None:
    async with open_fetching(rig, SUBJECT, 3) as case:
        ours, raw = await case.ours(), await case.baselines["raw TCP, 1 stream"]()
    assert (len(ours.calls), len(raw.calls)) == (3, 3)
    assert ours.value == sorted(ours.calls)[1]


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


PING = Subject("ping", "ping", "latency", "us", False, 64)
PAIRS = Subject("pairs", "pairs", "rate", "pairs/s", True, 64)


def asking(outstanding: int) -> Subject:
    return Subject(
        "n", "n", "concurrency", "requests/s", True, 100, outstanding=outstanding
    )


@pytest.mark.parametrize(
    ("opening", "subject", "count", "beside"),
    [
        (open_ping, PING, 25, [20, 20]),
        (open_pairs, PAIRS, 4, [10, 10]),
        *(
            (open_outstanding, asking(outstanding), 7, [7])
            for outstanding in (1, 3, 100)
        ),
    ],
)
async def test_as_many_calls_are_made_as_are_timed_and_no_entry_is_left(
    rig: Rig,
    any_left: Counter,
    opening: Any,
    subject: Subject,
    count: int,
    beside: list[int],
) -> None:
    async with opening(rig, subject, count) as case:
        assert await calls_of(case) == [count, *beside]
        assert (await case.ours()).value > 0  # by itself, too
    assert await any_left() == 0


@pytest.mark.parametrize(
    ("opening", "subject"),
    [(open_ping, PING), (open_pairs, PAIRS), (open_outstanding, asking(1))],
)
async def test_a_server_that_is_no_bench_is_asked_with_nothing_beside_it(
    plain_rig: Rig, opening: Any, subject: Subject
) -> None:
    async with opening(plain_rig, subject, 5) as case:
        assert await calls_of(case) == [5]
    assert await plain_rig.lookup.peek(plain_rig.prefix) == 0


async def test_every_tick_is_noted() -> None:
    assert len(await tick(4)) == 4


async def test_payload_moves_for_as_long_as_the_ticker_runs(
    rig: Rig, any_left: Counter
) -> None:
    subject = Subject("lag", "lag", "lag", "ms", False, 70_000, 2)
    async with open_lag(rig, subject, 5) as case:
        ours, idle = await case.ours(), await case.baselines["idle loop"]()
    assert (len(ours.calls), len(idle.calls)) == (5, 5)
    assert ours.nbytes >= 140_000
    assert idle.nbytes == 0
    assert ours.value == max(ours.calls)
    assert await any_left() == 0


def test_the_bins_grow() -> None:
    assert list(EDGES_MS) == sorted(set(EDGES_MS))


async def test_every_layer_arrives_and_leaves_nothing_behind(
    rig: Rig, any_left: Counter
) -> None:
    subject = Subject("tail", "tail", "tail", "ms", False, 70_000, 3)
    async with open_tail(rig, subject, 0.0) as case:
        ours = await case.ours()
        raw, bulk = [await one() for one in case.baselines.values()]
    assert (ours.nbytes, raw.nbytes, bulk.nbytes) == (210_000, 70_000, 210_000)
    assert min(ours.value, raw.value, bulk.value) > 0
    assert await any_left() == 0
