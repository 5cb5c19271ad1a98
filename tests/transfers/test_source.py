"""Where what is sent is read: on a GPU when it leaves, or in memory of the host."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator

import pytest
import torch

from asynckv.devices.copying import CopyPool
from asynckv.devices.tensors import KVOnGpu
from asynckv.errors import GPUFailed
from asynckv.tensors.arena import HeapArena
from asynckv.tensors.blocks import KVBlocks, KVMemory, spec_in
from asynckv.tensors.runs import joined
from asynckv.tensors.views import bytes_of
from asynckv.testing.blocked import until, until_blocked
from asynckv.testing.lookup_checks.values import MIB, noise
from asynckv.transfers.source import (
    GpuSource,
    HostSource,
    copied_sources,
    dense,
    lendable,
    release_staged,
    source_of,
    until_made,
)
from asynckv.transfers.targets import device_memory
from asynckv.types import TensorSpec
from harness.fake_devices import FakeDevice
from harness.fake_gpus.gates import Gate


@pytest.fixture
def pool(gpu: FakeDevice) -> Iterator[CopyPool]:
    pool = CopyPool(lanes=gpu.lanes())
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
    source = await source_of(memory, pool, None, MIB)
    assert source.is_on_gpu and source.place() is memory and source.region is None
    assert (source.spec, source.nbytes) == (memory.spec, MIB)
    with pytest.raises(TypeError, match="no view"):
        source.host()


async def test_what_is_small_or_no_tensor_of_a_gpu_is_read_in_the_host(
    gpu: FakeDevice, pool: CopyPool
) -> None:
    small = caught(gpu, pool, 8)
    blocks = KVBlocks(noise(MIB).view(4, -1), [2, 1])
    for memory, nbytes in ((small, 8), (small, MIB), (blocks, MIB), (noise(8), MIB)):
        source = await source_of(memory, pool, None, nbytes)
        assert not source.is_on_gpu and source.region is None
        assert source.host().nbytes == source.nbytes == memory.nbytes
        assert source.spec == spec_in(memory)


async def test_the_callers_stream_is_waited_for(
    gpu: FakeDevice, pool: CopyPool
) -> None:
    gate = Gate()
    gpu.tensors.stream(0).add(gate)
    task = asyncio.create_task(
        until_made([HostSource(noise(8)), GpuSource(caught(gpu, pool))], pool)
    )
    await until(lambda: pool._threads > 0)
    await until_blocked(task)
    assert not task.done()
    gate.open()
    await task


async def test_of_the_host_nothing_is_waited_for(pool: CopyPool) -> None:
    await until_made([HostSource(torch.zeros(8))], pool)
    assert not pool._threads


async def test_a_gpu_that_fails_is_told_before_anything_is_asked(
    gpu: FakeDevice, pool: CopyPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*anything: object) -> None:
        raise GPUFailed("it has fallen off the bus")

    monkeypatch.setattr(gpu.process.cuda, "copy", fail)
    source = GpuSource(caught(gpu, pool))
    with pytest.raises(GPUFailed, match="off the bus"):
        await until_made([source], pool)
    assert source.spec == TensorSpec((MIB,), "uint8")


async def test_dense_copies_only_what_is_not_dense() -> None:
    pool = CopyPool()
    tensor = torch.arange(12).reshape(3, 4)
    assert (await dense(tensor, pool)).data_ptr() == tensor.data_ptr()
    turned = await dense(tensor.t(), pool)
    assert turned.is_contiguous() and torch.equal(turned, tensor.t())
    complex_ = torch.ones(2, dtype=torch.complex64) * 1j
    assert torch.equal(await dense(complex_.conj(), pool), complex_.conj())
    pool.close()


@pytest.mark.parametrize("read", [dense, lendable])
async def test_what_is_on_a_gpu_is_read_from_a_copy_in_host_memory(
    gpu: FakeDevice,
    pool: CopyPool,
    read: Callable[[torch.Tensor, CopyPool], Awaitable[object]],
) -> None:
    source = torch.arange(3000).reshape(3, 1000)
    found = await read(gpu.tensor(source), pool)
    assert isinstance(found, torch.Tensor) and not found.is_cuda
    assert torch.equal(found, source)


def test_what_is_in_no_region_of_a_gpu_cannot_leave_from_there() -> None:
    (region,) = HeapArena(8).allocate([8]) or []
    for one in (None, region):
        with pytest.raises(TypeError, match="elsewhere"):
            device_memory(one, TensorSpec((8,), "uint8"))


@pytest.mark.parametrize("dtype", [torch.int64, torch.bfloat16, torch.float8_e4m3fn])
def test_few_plain_bytes_are_copied_where_they_are_looked_at(
    dtype: torch.dtype,
) -> None:
    tensor = torch.arange(8).to(dtype)[::2]
    is_now = bytes(bytes_of(tensor.contiguous()))
    sources = copied_sources({"key": tensor}, 32)
    assert sources is not None
    tensor.zero_()
    (source,) = sources.values()
    assert bytes(joined(source.host())) == is_now
    assert bytes(bytes_of(source.place())) == is_now  # type: ignore[arg-type]
    assert source.spec == spec_in(tensor)
    release_staged([source])
    assert bytes(joined(source.host())) == is_now


@pytest.mark.parametrize(
    "others",
    [
        {"value": torch.zeros(2, dtype=torch.uint8)},
        {"value": torch.nn.Parameter(torch.zeros(0))},
        {"value": KVBlocks(torch.zeros(2, 1), [0])},
    ],
)
def test_what_is_more_or_not_plain_is_not_copied(others: dict[str, KVMemory]) -> None:
    assert (
        copied_sources({"key": torch.zeros(3, dtype=torch.uint8), **others}, 4) is None
    )
