"""Buffers in the memory of a GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from asynckv.buffers.lookup import LookupBuffer
from asynckv.buffers.store import StoreBuffer
from asynckv.testing.fake_devices import FakeDevice, fake_device
from asynckv.testing.lookup_checks.values import (
    LOOKUP_MAX_BYTES,
    MIB,
    LookupCheck,
)
from asynckv.testing.lookup_conformance import LOOKUP_CHECKS
from asynckv.testing.store_checks.values import StoreCheck
from asynckv.testing.store_conformance import STORE_CHECKS


@pytest.fixture
def gpu() -> Iterator[FakeDevice]:
    with fake_device() as gpu:
        yield gpu


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


@pytest.mark.parametrize("check", STORE_CHECKS, ids=lambda check: check.__name__)
async def test_a_store_buffer_on_a_gpu_keeps_what_every_one_keeps(
    gpu: FakeDevice, check: StoreCheck
) -> None:
    async with StoreBuffer("16MiB", device=gpu.device) as buffer:
        await check(buffer, buffer)


async def test_nothing_of_the_gpu_is_kept_by_a_closed_buffer(gpu: FakeDevice) -> None:
    async with LookupBuffer("16MiB", device=gpu.device, drain_s=0) as buffer:
        await buffer.insert([1, 2], None, torch.ones(MIB), None, None)
        assert gpu.process.owned
    assert not gpu.process.owned
