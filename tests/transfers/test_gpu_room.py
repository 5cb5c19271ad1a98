from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from asynckv.devices.copying import CopyPool
from asynckv.devices.cuda import DeviceMemory
from asynckv.devices.growth import Growth
from asynckv.errors import GPUFailed, PeerLost
from asynckv.tensors.blocks import KVBlocks
from asynckv.tensors.paged_arena import PagedArena
from asynckv.testing.blocked import until_blocked
from asynckv.testing.expectations import is_same
from asynckv.testing.lookup_checks.values import noise
from asynckv.transfers.routes import GpuRoom
from asynckv.transfers.source import (
    GpuStaging,
    HostSource,
    StagedTensor,
    release_staged,
)
from asynckv.types import TensorSpec
from asynckv.waits.waiting import Reply
from harness.fake_devices import FakeDevice, fake_device
from harness.fake_gpus.streams import Delay

LARGEST = 2**20
NBYTES = 2**17
ROOM = 4 * NBYTES


class Ground:
    def __init__(self, growth: Growth) -> None:
        self.growth = growth
        self.room = GpuRoom(growth)
        self.lost = set[Reply[list[StagedTensor]]]()

    @property
    def used_bytes(self) -> int:
        return self.growth.arena.used_bytes

    async def take(self, *sizes: int) -> list[StagedTensor]:
        specs: Sequence[TensorSpec] = [TensorSpec((size,), "uint8") for size in sizes]
        return await self.room.take(specs, self.lost) or []

    async def waiting(self, *sizes: int) -> asyncio.Task[list[StagedTensor]]:
        task = asyncio.create_task(self.take(*sizes))
        await until_blocked(task)
        return task


@pytest.fixture
async def ground() -> AsyncIterator[Ground]:
    with fake_device() as gpu:
        ground = Ground(Growth(ROOM, device=gpu.device))
        await ground.growth.open()
        yield ground
        assert not (ground.used_bytes or ground.room._line or ground.lost)
        await ground.growth.aclose()


async def test_what_belongs_together_is_taken_at_once_or_not_at_all(
    ground: Ground,
) -> None:
    first = await ground.take(NBYTES, NBYTES, NBYTES)
    assert [one.nbytes for one in first] == 3 * [NBYTES]
    waiting = await ground.waiting(NBYTES, NBYTES)
    assert ground.used_bytes == 3 * NBYTES
    release_staged(first)
    release_staged(await waiting)


async def test_who_asked_first_is_first_however_much_he_wants(ground: Ground) -> None:
    first, some = await ground.take(NBYTES), await ground.take(3 * NBYTES)
    large = await ground.waiting(2 * NBYTES)
    small = await ground.waiting(NBYTES)
    release_staged(first)
    await until_blocked(small)
    assert not (large.done() or small.done())
    release_staged(some)
    release_staged([*await large, *await small])


async def test_a_place_in_the_line_that_is_given_up_holds_nobody_up(
    ground: Ground,
) -> None:
    some = await ground.take(3 * NBYTES)
    large, small = await ground.waiting(2 * NBYTES), await ground.waiting(NBYTES)
    large.cancel()
    release_staged(await small)
    assert large.cancelled()
    release_staged(some)


async def test_memory_that_comes_with_a_cancellation_goes_back(ground: Ground) -> None:
    some = await ground.take(ROOM)
    waiting = await ground.waiting(NBYTES)
    release_staged(some)
    ground.room._recheck()
    assert ground.used_bytes == NBYTES
    waiting.cancel()
    await asyncio.wait([waiting])
    assert waiting.cancelled() and not ground.used_bytes


async def test_memory_that_something_is_still_at_is_nobody_elses(
    ground: Ground,
) -> None:
    (one,) = await ground.take(ROOM)
    place = one.place()
    one.release()
    waiting = await ground.waiting(NBYTES)
    del place
    release_staged(await waiting)


async def test_what_never_fits_waits_for_nothing(
    ground: Ground, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        assert await ground.take(NBYTES, ROOM) == []
    assert caplog.text.count("leave through host memory") == 1


async def test_what_never_fits_is_compared_with_what_the_gpu_gave(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with fake_device() as gpu:
        ground = Ground(Growth(2 * LARGEST, device=gpu.device))
        cuda, malloc = gpu.process.cuda, gpu.process.cuda.malloc

        def refuse(nbytes: int) -> DeviceMemory:
            if nbytes > LARGEST * 3 // 2:
                raise GPUFailed("out of memory", code=2)
            return malloc(nbytes)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cuda, "malloc", refuse)
            await ground.growth.open()
        there = ground.growth.arena
        assert isinstance(there, PagedArena) and there.pages.nbytes <= LARGEST
        assert await ground.take(LARGEST, LARGEST) == []
        assert f"there are {there.pages.nbytes} of the GPU" in caplog.text
        await ground.growth.aclose()


async def test_nobody_is_given_what_others_wait_for(ground: Ground) -> None:
    pool = ground.growth.make_pool()
    staging = GpuStaging(
        *(ground.growth, pool), takes_host=True, is_awaited=ground.room.is_awaited
    )
    some = await ground.take(3 * NBYTES)
    waiting = await ground.waiting(2 * NBYTES)
    assert await staging.staged(noise(NBYTES)) is None
    release_staged(some)
    release_staged(await waiting)
    staged = await staging.staged(noise(NBYTES))
    assert staged is not None
    staged.release()
    pool.close()


async def test_who_waits_when_the_memory_is_closed_fails(ground: Ground) -> None:
    some = await ground.take(ROOM)
    waiting = await ground.waiting(NBYTES)
    ground.growth.close()
    release_staged(some)
    with pytest.raises(PeerLost, match="closed"):
        await waiting


async def test_memory_may_be_given_back_where_no_loop_runs(ground: Ground) -> None:
    some = await ground.take(ROOM)
    waiting = await ground.waiting(NBYTES)
    with ThreadPoolExecutor(1) as thread:
        thread.submit(release_staged, some).result()
    release_staged(await waiting)


def test_memory_may_be_given_back_when_who_waited_has_no_loop_any_more() -> None:
    with fake_device() as gpu:
        loop = asyncio.new_event_loop()
        growth = Growth(ROOM, device=gpu.device)
        loop.run_until_complete(growth.open())
        ground = Ground(growth)
        some = loop.run_until_complete(ground.take(ROOM))
        waiting = loop.create_task(ground.take(NBYTES))
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()
        release_staged(some)
        assert not (ground.used_bytes or waiting.done())
        growth.close()


async def test_who_waits_can_be_failed(ground: Ground) -> None:
    some = await ground.take(ROOM)
    waiting = await ground.waiting(NBYTES)
    for turn in ground.lost:
        turn.fail(PeerLost("gone"))
    ground.room._recheck()  # before it has woken up
    with pytest.raises(PeerLost, match="gone"):
        await waiting
    release_staged(some)


class GpuGround:
    def __init__(self, gpu: FakeDevice) -> None:
        self.gpu = gpu
        self.growth = Growth(2 * NBYTES, device=gpu.device)
        self.pool = self.growth.make_pool()
        self.staging = GpuStaging(self.growth, self.pool)

    async def read(self, staged: StagedTensor) -> torch.Tensor:
        """Return what lies there, in host memory."""
        copy = self.pool.host_empty(staged.spec)
        await self.pool.copy([staged.place()], [copy])
        return copy


@pytest.fixture
async def gpu_ground() -> AsyncIterator[GpuGround]:
    with fake_device() as gpu:
        gpu_ground = GpuGround(gpu)
        await gpu_ground.growth.open()
        yield gpu_ground
        gpu_ground.pool.close()
        await gpu_ground.growth.aclose()
        assert not gpu_ground.growth.arena.used_bytes


async def test_a_copy_is_made_at_once_where_there_is_room_or_not_at_all(
    gpu_ground: GpuGround,
) -> None:
    pool, source = gpu_ground.pool, gpu_ground.gpu.tensor(noise(NBYTES))
    awaited = GpuStaging(gpu_ground.growth, pool, is_awaited=lambda: True)
    assert await awaited.staged(source) is None
    made = [await gpu_ground.staging.staged(source) for _ in range(3)]
    assert [one is None for one in made] == [False, False, True]
    release_staged([one for one in made if one is not None])
    assert await GpuStaging(Growth(NBYTES), pool).staged(source) is None
    closed = Growth(NBYTES, device=gpu_ground.gpu.device)
    assert await GpuStaging(closed, pool).staged(source) is None


async def test_what_is_on_the_gpu_is_copied_there(gpu_ground: GpuGround) -> None:
    pool = gpu_ground.gpu.tensor(noise(NBYTES).view(4, -1))
    for source in (pool.t(), gpu_ground.pool.catch(pool), KVBlocks(pool, [2, 0])):
        staged = await gpu_ground.staging.staged(source)
        assert staged is not None and staged.nbytes == source.nbytes
        found = await gpu_ground.read(staged)
        staged.release()
        assert found.shape == source.shape
    assert is_same(found, noise(NBYTES).view(4, -1)[[2, 0]])


async def test_what_is_elsewhere_is_left_where_it_is(gpu_ground: GpuGround) -> None:
    host = noise(NBYTES)
    assert await gpu_ground.staging.staged(host) is None
    assert await gpu_ground.staging.staged(KVBlocks(host.view(4, -1), [1])) is None
    release_staged([HostSource(host)])
    nowhere = CopyPool()
    key = gpu_ground.gpu.tensor(host)
    assert await GpuStaging(Growth(NBYTES), nowhere).staged(key) is None
    nowhere.close()


async def test_there_is_only_as_much_room_as_there_is(gpu_ground: GpuGround) -> None:
    key = gpu_ground.gpu.tensor(noise(NBYTES))
    staged = [await gpu_ground.staging.staged(key) for _ in range(3)]
    assert [one is not None for one in staged] == [True, True, False]
    release_staged([one for one in staged if one is not None])
    again = await gpu_ground.staging.staged(key)
    assert again is not None
    again.release()


async def test_a_copy_that_fails_or_is_cancelled_leaves_nothing(
    gpu_ground: GpuGround, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*anything: object) -> None:
        raise GPUFailed("it has fallen off the bus")

    key = gpu_ground.gpu.tensor(noise(NBYTES))
    with monkeypatch.context() as patch:
        patch.setattr(gpu_ground.gpu.process.cuda, "copy", fail)
        with pytest.raises(GPUFailed, match="off the bus"):
            await gpu_ground.staging.staged(key)
    gpu_ground.gpu.tensors.stream(0).add(Delay(20))
    task = asyncio.create_task(gpu_ground.staging.staged(key))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait({task})
    assert task.cancelled() and not gpu_ground.growth.arena.used_bytes
