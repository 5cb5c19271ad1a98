from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest

from asynckv.cli.bench.baselines import name_of_streams
from asynckv.cli.bench.cases import open_fetching, open_moving, pull
from asynckv.cli.bench.report import Subject
from asynckv.cli.bench.rig import Rig, make_memory

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
