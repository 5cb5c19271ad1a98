"""What is read on a GPU when it leaves, and what is brought to the host before."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
import torch

from asynckv.errors import GPUFailed
from asynckv.tensors.blocks import KVBlocks
from asynckv.tensors.copying import CopyPool
from asynckv.tensors.on_gpu import KVOnGpu
from asynckv.testing.blocked import until, until_blocked
from asynckv.testing.lookup_checks.values import MIB, noise
from asynckv.transfers.staging import SourceOnGpu, gpu_source, until_made
from asynckv.types import TensorSpec
from harness.fake_devices import FakeDevice
from harness.fake_gpus.gates import Gate


@pytest.fixture
def pool(gpu: FakeDevice) -> Iterator[CopyPool]:
    pool = CopyPool(stagings=gpu.stagings())
    yield pool
    pool.close()


def caught(gpu: FakeDevice, pool: CopyPool, nbytes: int = MIB) -> KVOnGpu:
    found = pool.catch(gpu.tensor(noise(nbytes)))
    assert isinstance(found, KVOnGpu)
    return found


async def test_what_is_long_is_read_where_it_is(
    gpu: FakeDevice, pool: CopyPool
) -> None:
    memory = caught(gpu, pool)
    assert await gpu_source(memory, None, MIB) is memory
    assert SourceOnGpu(memory).place(memory.spec) is memory


async def test_what_rides_or_is_no_tensor_of_a_gpu_is_not(
    gpu: FakeDevice, pool: CopyPool
) -> None:
    small = caught(gpu, pool, 8)
    assert await gpu_source(small, None, 8) is None
    assert await gpu_source(small, None, MIB) is None
    blocks = KVBlocks(gpu.tensor(noise(MIB).view(4, -1)), [2, 1])
    assert await gpu_source(blocks, None, MIB) is None
    assert await gpu_source(noise(MIB), None, MIB) is None


async def test_the_callers_stream_is_waited_for(
    gpu: FakeDevice, pool: CopyPool
) -> None:
    gate = Gate()
    gpu.tensors.stream(0).add(gate)
    task = asyncio.create_task(until_made([noise(8), caught(gpu, pool)], pool))
    await until(lambda: pool._threads > 0)
    await until_blocked(task)
    assert not task.done()
    gate.open()
    await task


async def test_of_the_host_nothing_is_waited_for(pool: CopyPool) -> None:
    await until_made([torch.zeros(8)], pool)
    assert not pool._threads


async def test_a_gpu_that_fails_is_told_before_anything_is_asked(
    gpu: FakeDevice, pool: CopyPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*anything: object) -> None:
        raise GPUFailed("it has fallen off the bus")

    monkeypatch.setattr(gpu.process.cuda, "copy", fail)
    source = caught(gpu, pool)
    with pytest.raises(GPUFailed, match="off the bus"):
        await until_made([source], pool)
    assert source.spec == TensorSpec((MIB,), "uint8")
