"""Buffers in the memory of the host or of a GPU, and what they count."""

from __future__ import annotations

import asyncio
import dataclasses
import importlib.util

import pytest
import torch

from asynckv import (
    BufferClosed,
    ConfigError,
    GPUFailed,
    GPUUnavailable,
    KVEntry,
    LookupBuffer,
    StoreBuffer,
    TensorSpec,
)
from asynckv.buffers.in_memory import InMemoryBuffer
from asynckv.buffers.statistics import (
    Counters,
    LookupStatistics,
    StoreCounters,
    StoreStatistics,
)
from asynckv.devices.names import Device
from asynckv.devices.tensors import Gpus
from asynckv.testing import LOOKUP_CHECKS
from asynckv.testing.expectations import is_same
from asynckv.testing.lookup_checks.values import (
    LOOKUP_MAX_BYTES,
    MIB,
    LookupCheck,
    noise,
)
from harness.fake_devices import FakeDevice, fake_device
from harness.fake_gpus.streams import Delay

KINDS = [LookupBuffer, StoreBuffer]


@pytest.mark.parametrize("kind", KINDS)
async def test_what_has_no_device_is_in_host_memory(
    kind: type[LookupBuffer | StoreBuffer],
) -> None:
    async with kind("1MiB") as buffer:
        assert isinstance(buffer, InMemoryBuffer)
        assert not buffer.is_on_gpu and buffer.growth.open_device is None
        await buffer.open()


@pytest.mark.parametrize("kind", KINDS)
async def test_a_closed_buffer_cannot_be_entered_again(
    kind: type[LookupBuffer | StoreBuffer],
) -> None:
    async with kind("1MiB") as buffer:
        assert not buffer.is_closed
    with pytest.raises(BufferClosed):
        await buffer.__aenter__()


async def test_a_device_is_open_while_the_buffer_is() -> None:
    with fake_device() as gpu:
        buffer = LookupBuffer("1MiB", device=gpu.device)
        assert buffer.is_on_gpu and buffer.growth.open_device is None
        await buffer.open()
        assert buffer.growth.open_device == gpu.device
        buffer.abort()
        await buffer.aclose()
        assert buffer.growth.open_device is None and not gpu.process.owned


async def test_a_buffer_is_shown_with_what_it_holds() -> None:
    async with LookupBuffer(100, drain_s=0) as buffer, StoreBuffer(100) as store:
        await buffer.insert([1, 2], None, None, None, None)
        assert repr(buffer) == "<LookupBuffer, 1 entries, 16 of 100 bytes>"
        assert repr(store) == "<StoreBuffer, 0 keys, 0 of 100 bytes>"


@pytest.mark.parametrize("kind", KINDS)
def test_a_buffer_of_no_bytes_is_refused(
    kind: type[LookupBuffer | StoreBuffer],
) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        kind("0 GiB")


def has_cupy() -> bool:
    return importlib.util.find_spec("cupy") is not None


def key_on_gpu(entry: KVEntry) -> torch.Tensor:
    assert isinstance(entry.key, torch.Tensor) and entry.key.is_cuda
    return entry.key


@pytest.mark.parametrize("check", LOOKUP_CHECKS, ids=lambda check: check.__name__)
async def test_a_lookup_buffer_on_a_gpu_keeps_what_every_one_keeps(
    gpu: FakeDevice, check: LookupCheck
) -> None:
    device = gpu.device
    async with LookupBuffer(LOOKUP_MAX_BYTES, device=device, drain_s=0) as buffer:
        await check(buffer, buffer, buffer)


@pytest.mark.parametrize("name", ["tpu", "cuda:x", "cuda:-1", "mps", "cuda0"])
def test_a_device_that_is_none_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        LookupBuffer(device=name)


@pytest.mark.skipif(has_cupy(), reason="CuPy is here")
async def test_without_cupy_a_gpu_is_unavailable_and_the_hint_says_what_to_do() -> None:
    with pytest.raises(GPUUnavailable, match="CuPy") as caught:
        async with LookupBuffer("1MiB", device="cuda:0"):
            pass
    assert ".[cuda12]" in caught.value.hint


async def test_a_stream_is_told_of_a_gpu_that_is_not_there(gpu: FakeDevice) -> None:
    buffer = LookupBuffer("1MiB", device=dataclasses.replace(gpu.device, index=7))
    specs = {"key": TensorSpec((MIB // 2,), "uint8")}
    async with asyncio.timeout(5):
        with pytest.raises(GPUUnavailable):
            async with buffer.open_insert([1], None, specs):
                pass
    await buffer.aclose()


async def test_a_gpu_that_is_not_there_is_unavailable(gpu: FakeDevice) -> None:
    buffer = LookupBuffer("1MiB", device=dataclasses.replace(gpu.device, index=7))
    with pytest.raises(GPUUnavailable, match="cuda:7"):
        await buffer.insert([1], None, torch.ones(2), None, None)
    await buffer.aclose()


async def test_a_buffer_is_not_entered_whose_gpu_cannot_be_opened() -> None:
    def fail() -> Gpus:
        raise ValueError("numpy.dtype size changed")

    with pytest.raises(GPUFailed, match="dtype size"):
        async with LookupBuffer("1MiB", device=Device(0, fail)):
            pass


async def test_a_view_that_the_gpu_still_reads_keeps_its_memory(
    gpu: FakeDevice,
) -> None:
    stream = gpu.tensors.stream(0)
    async with LookupBuffer(2 * MIB, device=gpu.device, drain_s=0) as buffer:
        key = buffer.empty((2 * MIB,), torch.uint8)
        stream.add(Delay(10))  # it is still being computed into when it is dropped
        del key
        assert buffer.statistics().pinned_bytes == 2 * MIB
        await buffer.insert([1], None, noise(2 * MIB - 64), None, None)
        assert not stream.work


async def test_what_is_inserted_is_read_when_it_is_ready(gpu: FakeDevice) -> None:
    stream = gpu.tensors.stream(0)
    key = gpu.tensor(torch.zeros(MIB, dtype=torch.uint8))
    made = gpu.tensor(noise(MIB))
    async with LookupBuffer("4MiB", device=gpu.device, drain_s=0) as buffer:
        stream.add(Delay(50))
        to, source = gpu.tensors.memory_of(key), gpu.tensors.memory_of(made)
        gpu.process.cuda.copy(to.address, source.address, MIB, stream)
        await buffer.insert([1], None, key, None, None)
        assert is_same(key_on_gpu(await buffer.drop_select([1])), noise(MIB))


async def test_tensors_of_the_buffers_own_memory_are_inserted_where_they_are(
    gpu: FakeDevice,
) -> None:
    async with LookupBuffer(2 * MIB, device=gpu.device, drain_s=0) as buffer:
        key = buffer.empty((MIB + 8,), torch.uint8)
        key.copy_(noise(MIB + 8))
        await buffer.insert([1], None, key, None, None)  # a copy has no room
        del key
        assert is_same(key_on_gpu(await buffer.drop_select([1])), noise(MIB + 8))


def test_a_buffer_says_where_it_is(gpu: FakeDevice) -> None:
    assert LookupBuffer("1MiB").device == "cpu"
    assert LookupBuffer("1MiB", device=gpu.device).device == "cuda:0"


def names(kind: type[object]) -> set[str]:
    return {field.name for field in dataclasses.fields(kind)}  # type: ignore[arg-type]


def test_every_counter_is_in_the_statistics() -> None:
    assert names(Counters) <= names(LookupStatistics)
    assert names(StoreCounters) <= names(StoreStatistics)


def test_a_new_buffer_has_counted_nothing() -> None:
    values = dataclasses.asdict(LookupBuffer("1KiB").statistics())
    assert values.pop("max_bytes") == 1024
    assert not any(values.values())


async def test_gauges_and_counters_follow_an_entry() -> None:
    async with LookupBuffer("1KiB") as buffer:
        await buffer.insert([1], None, None, None, None)
        async with buffer.drop_select([1]):
            now = buffer.statistics()
            assert (now.used_bytes, now.entries, now.leased) == (8, 1, 1)
        now = buffer.statistics()
        assert (now.inserted, now.delivered, now.acknowledged) == (1, 1, 1)
        assert (now.used_bytes, now.peak_bytes, now.entries) == (0, 8, 0)


async def test_a_wait_for_the_systems_memory_is_no_wait_for_room() -> None:
    megabyte = torch.ones(2**20, dtype=torch.uint8)
    async with (
        LookupBuffer("64MiB", drain_s=0) as buffer,
        StoreBuffer("64MiB") as store,
    ):
        await buffer.insert([1], None, megabyte, None, None)
        await store.put("key", megabyte)
        assert buffer.statistics().room_waits == store.statistics().room_waits == 0
