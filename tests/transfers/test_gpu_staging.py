from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import torch

from asynckv.devices.copying import CopyPool
from asynckv.devices.growth import Growth
from asynckv.errors import GPUFailed
from asynckv.tensors.blocks import KVBlocks
from asynckv.testing.expectations import is_same
from asynckv.testing.lookup_checks.values import noise
from asynckv.transfers.source import (
    GpuStaging,
    HostSource,
    StagedTensor,
    release_staged,
)
from harness.fake_devices import FakeDevice, fake_device
from harness.fake_gpus.streams import Delay

NBYTES = 2**17


class Ground:
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
async def ground() -> AsyncIterator[Ground]:
    with fake_device() as gpu:
        ground = Ground(gpu)
        await ground.growth.open()
        yield ground
        ground.pool.close()
        await ground.growth.aclose()
        assert not ground.growth.arena.used_bytes


async def test_a_copy_is_made_at_once_where_there_is_room_or_not_at_all(
    ground: Ground,
) -> None:
    pool, source = ground.pool, ground.gpu.tensor(noise(NBYTES))
    awaited = GpuStaging(ground.growth, pool, is_awaited=lambda: True)
    assert await awaited.staged(source) is None
    made = [await ground.staging.staged(source) for _ in range(3)]
    assert [one is None for one in made] == [False, False, True]
    release_staged([one for one in made if one is not None])
    assert await GpuStaging(Growth(NBYTES), pool).staged(source) is None
    closed = Growth(NBYTES, device=ground.gpu.device)
    assert await GpuStaging(closed, pool).staged(source) is None


async def test_what_is_on_the_gpu_is_copied_there(ground: Ground) -> None:
    pool = ground.gpu.tensor(noise(NBYTES).view(4, -1))
    for source in (pool.t(), ground.pool.catch(pool), KVBlocks(pool, [2, 0])):
        staged = await ground.staging.staged(source)
        assert staged is not None and staged.nbytes == source.nbytes
        found = await ground.read(staged)
        staged.release()
        assert found.shape == source.shape
    assert is_same(found, noise(NBYTES).view(4, -1)[[2, 0]])


async def test_what_is_elsewhere_is_left_where_it_is(ground: Ground) -> None:
    host = noise(NBYTES)
    assert await ground.staging.staged(host) is None
    assert await ground.staging.staged(KVBlocks(host.view(4, -1), [1])) is None
    release_staged([HostSource(host)])
    nowhere = CopyPool()
    key = ground.gpu.tensor(host)
    assert await GpuStaging(Growth(NBYTES), nowhere).staged(key) is None
    nowhere.close()


async def test_there_is_only_as_much_room_as_there_is(ground: Ground) -> None:
    key = ground.gpu.tensor(noise(NBYTES))
    staged = [await ground.staging.staged(key) for _ in range(3)]
    assert [one is not None for one in staged] == [True, True, False]
    release_staged([one for one in staged if one is not None])
    again = await ground.staging.staged(key)
    assert again is not None
    again.release()


async def test_a_copy_that_fails_or_is_cancelled_leaves_nothing(
    ground: Ground, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*anything: object) -> None:
        raise GPUFailed("it has fallen off the bus")

    key = ground.gpu.tensor(noise(NBYTES))
    with monkeypatch.context() as patch:
        patch.setattr(ground.gpu.process.cuda, "copy", fail)
        with pytest.raises(GPUFailed, match="off the bus"):
            await ground.staging.staged(key)
    ground.gpu.tensors.stream(0).add(Delay(20))
    task = asyncio.create_task(ground.staging.staged(key))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait({task})
    assert task.cancelled() and not ground.growth.arena.used_bytes
