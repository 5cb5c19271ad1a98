from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest

from asynckv.buffers.stage import Stage
from asynckv.tensors.slab_regions import SlabRegion
from asynckv.tensors.slabs import Slabs, has_slabs
from asynckv.testing.blocked import until
from asynckv.testing.cancellation import CancelMode, Outcome, sweep_cancellation

pytestmark = pytest.mark.skipif(not has_slabs(), reason="no memory files here")

MIB = 2**20


@pytest.fixture
async def stage() -> AsyncIterator[Stage]:
    stage = Stage(4 * MIB)
    yield stage
    stage.close()
    await stage.aclose()


def release(regions: Sequence[SlabRegion] | None) -> None:
    assert regions is not None
    for region in regions:
        region.release()


async def test_memory_is_got_when_it_is_needed(stage: Stage) -> None:
    regions = await stage.take([MIB, 100])
    assert regions is not None and [r.nbytes for r in regions] == [MIB, 100]
    assert stage.used_bytes == MIB + 100
    release(regions)
    assert not stage.used_bytes and not stage.late_views


async def test_who_finds_no_room_gets_none_at_once(stage: Stage) -> None:
    regions = await stage.take([3 * MIB])
    assert await stage.take([2 * MIB]) is None
    release(regions)
    release(await stage.take([2 * MIB]))


async def test_what_could_never_fit_asks_for_no_memory(stage: Stage) -> None:
    assert await stage.take([5 * MIB]) is None
    assert stage._growth._growing is None


async def test_what_a_peer_may_have_views_of_is_in_use(stage: Stage) -> None:
    regions = await stage.take([3 * MIB])
    assert regions is not None
    hold = regions[0].hold()
    release(regions)
    assert stage.used_bytes == 3 * MIB and await stage.take([2 * MIB]) is None
    hold.release()
    assert not stage.used_bytes


async def test_without_memory_files_there_is_none(
    monkeypatch: pytest.MonkeyPatch, stage: Stage
) -> None:
    def refuse(slabs: Slabs, max_bytes: int) -> None:
        raise OSError("too many files")

    with monkeypatch.context() as patch:
        patch.setattr(Slabs, "__init__", refuse)
        assert await stage.take([MIB]) is None
    assert not stage.used_bytes


async def test_where_no_memory_is_shared_there_is_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("asynckv.tensors.growth.has_slabs", lambda: False)
        stage = Stage(4 * MIB)
    assert await stage.take([MIB]) is None
    await stage.aclose()


async def test_a_closed_stage_has_none(stage: Stage) -> None:
    regions = await stage.take([MIB])
    stage.close()
    assert await stage.take([MIB]) is None
    release(regions)


async def test_a_cancelled_wait_for_memory_leaves_no_trace() -> None:
    stages = list[Stage]()

    async def renew() -> None:
        stages.append(Stage(4 * MIB))

    async def check(
        k: int, mode: CancelMode, outcome: Outcome[list[SlabRegion] | None]
    ) -> None:
        if not outcome.cancelled:
            release(outcome.value)
        await until(lambda: stages[-1]._growth._growing is None)
        assert not stages[-1].used_bytes
        await stages[-1].aclose()

    await sweep_cancellation(lambda: stages[-1].take([MIB]), check, before=renew)


async def test_two_wait_for_one_slab(stage: Stage) -> None:
    first, second = (asyncio.create_task(stage.take([MIB])) for _ in range(2))
    release(await first)
    release(await second)
