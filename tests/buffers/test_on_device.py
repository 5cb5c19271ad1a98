"""Buffers in the memory of a GPU."""

from __future__ import annotations

import asyncio
import dataclasses
import importlib.util

import pytest
import torch

from asynckv.abc import KVEntry
from asynckv.buffers.lookup import LookupBuffer
from asynckv.errors import ConfigError, GPUUnavailable
from asynckv.testing.expectations import is_same
from asynckv.testing.lookup_checks.values import (
    LOOKUP_MAX_BYTES,
    MIB,
    LookupCheck,
    noise,
)
from asynckv.testing.lookup_conformance import LOOKUP_CHECKS
from asynckv.types import TensorSpec
from harness.fake_devices import FakeDevice
from harness.fake_gpus.streams import Delay


def has_cupy() -> bool:
    return importlib.util.find_spec("cupy") is not None


def only(entry: KVEntry) -> torch.Tensor:
    assert isinstance(entry.key, torch.Tensor) and entry.key.is_cuda
    return entry.key


async def test_an_entry_on_a_gpu_comes_back_there(gpu: FakeDevice) -> None:
    key = gpu.tensor(torch.arange(MIB, dtype=torch.int32))
    async with LookupBuffer("16MiB", device=gpu.device, drain_s=0) as buffer:
        await buffer.insert([1, 2], None, key, None, None)
        entry = await buffer.drop_select([1, 2])
    assert isinstance(entry.key, torch.Tensor) and entry.key.is_cuda
    assert torch.equal(entry.key.cpu(), key.cpu())


@pytest.mark.parametrize("check", LOOKUP_CHECKS, ids=lambda check: check.__name__)
async def test_a_lookup_buffer_on_a_gpu_keeps_what_every_one_keeps(
    gpu: FakeDevice, check: LookupCheck
) -> None:
    device = gpu.device
    async with LookupBuffer(LOOKUP_MAX_BYTES, device=device, drain_s=0) as buffer:
        await check(buffer, buffer, buffer)


async def test_nothing_of_the_gpu_is_kept_by_a_closed_buffer(gpu: FakeDevice) -> None:
    async with LookupBuffer("16MiB", device=gpu.device, drain_s=0) as buffer:
        await buffer.insert([1, 2], None, torch.ones(MIB), None, None)
        assert gpu.process.owned
    assert not gpu.process.owned


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
        assert is_same(only(await buffer.drop_select([1])), noise(MIB))


async def test_tensors_of_the_buffers_own_memory_are_inserted_where_they_are(
    gpu: FakeDevice,
) -> None:
    async with LookupBuffer(2 * MIB, device=gpu.device, drain_s=0) as buffer:
        key = buffer.empty((MIB + 8,), torch.uint8)
        key.copy_(noise(MIB + 8))
        await buffer.insert([1], None, key, None, None)  # a copy has no room
        del key
        assert is_same(only(await buffer.drop_select([1])), noise(MIB + 8))


def test_a_buffer_says_where_it_is(gpu: FakeDevice) -> None:
    assert LookupBuffer("1MiB").device == "cpu"
    assert LookupBuffer("1MiB", device=gpu.device).device == "cuda:0"
