"""What connects two GPUs, where it cannot be opened, or breaks: the link goes on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import torch

from asynckv.errors import GPUFailed, GPUUnavailable, PeerLost
from asynckv.links.gpu_link import GpuPathLost
from asynckv.tensors.devices import Device
from asynckv.testing.blocked import until
from asynckv.testing.expectations import is_same
from asynckv.testing.fake_gpus import FakeGpus
from asynckv.testing.lookup_checks.values import MIB, noise
from asynckv.testing.nccl_buffer_pairs import NcclBuffers, open_nccl_buffers
from asynckv.transports.nccl import workers
from asynckv.transports.nccl.workers import WorkerUse, use_worker

BY_HOST = "goes through host memory"


@pytest.fixture
async def pair(two_gpus: FakeGpus) -> AsyncIterator[NcclBuffers]:
    async with open_nccl_buffers(two_gpus) as pair:
        yield pair


async def check_comes_by_host(pair: NcclBuffers) -> None:
    await pair.buffer.insert([2], None, noise(MIB), None, None)
    entry = await pair.peer.lookup.drop_select([2])
    assert isinstance(entry.key, torch.Tensor) and entry.key.is_cuda
    assert is_same(entry.key, noise(MIB)) and pair.peer.transport == "inline"


async def test_versions_that_differ_are_no_way(
    two_gpus: FakeGpus, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    async with open_nccl_buffers(two_gpus, their_nccl=1) as pair:
        await check_comes_by_host(pair)
        await check_comes_by_host(pair)
    assert caplog.text.count(BY_HOST) == 1 and "NCCL 1 here" in caplog.text


@pytest.mark.parametrize("lacking", [0, 1])
async def test_without_nccl_there_is_no_way(
    two_gpus: FakeGpus,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    lacking: int,
) -> None:
    def find(device: Device) -> WorkerUse:
        if device.index == lacking:
            raise GPUUnavailable("no NCCL here")
        return use_worker(device)

    caplog.set_level("INFO")
    monkeypatch.setattr(workers, "use_worker", find)
    async with open_nccl_buffers(two_gpus) as pair:
        await check_comes_by_host(pair)
    assert caplog.text.count(BY_HOST) == 1 and "no NCCL here" in caplog.text


async def test_a_url_that_asks_for_lanes_gets_them(two_gpus: FakeGpus) -> None:
    async with open_nccl_buffers(two_gpus, url="?payload=map") as pair:
        await check_comes_by_host(pair)


@pytest.mark.parametrize("end", ["way", "near_way"])
async def test_after_a_worker_was_given_up_the_link_goes_on(
    pair: NcclBuffers, end: str, caplog: pytest.LogCaptureFixture
) -> None:
    way = getattr(pair, end)
    way.transport._worker.give_up(GPUFailed("it is stuck"))
    await until(lambda: pair.peer.transport == "inline")
    await check_comes_by_host(pair)
    assert "from here on" in caplog.text


@pytest.mark.parametrize("end", ["way", "near_way"])
async def test_what_was_under_way_when_the_way_broke_comes_by_host(
    pair: NcclBuffers, end: str
) -> None:
    pair.ours.process.nccl.is_silent = True
    await pair.buffer.insert([1], None, noise(MIB), None, None)
    select = asyncio.create_task(pair.peer.lookup.drop_select([1]))
    await until(lambda: pair.near_way.transport.receiver.is_busy)
    getattr(pair, end)._stalled(PeerLost("nothing has come for long"))
    assert is_same((await select).key, noise(MIB))  # type: ignore[arg-type]
    assert pair.peer.transport == "inline" and not pair.peer.budget.used_bytes


async def test_memory_that_a_lost_gpu_may_write_to_gets_no_other_bytes(
    pair: NcclBuffers,
) -> None:
    pair.ours.process.nccl.is_silent = True
    await pair.buffer.insert([1], None, noise(MIB), None, None)
    into = {"key": pair.theirs.tensor(torch.zeros(MIB, dtype=torch.uint8))}
    lookup = pair.peer.lookup
    select = asyncio.create_task(lookup.drop_select([1], into=into))
    await until(lambda: pair.near_way.transport.receiver.is_busy)
    pair.near_way.transport._worker.give_up(GPUFailed("it is stuck"))
    with pytest.raises(GpuPathLost, match="it is stuck"):
        await select
    assert is_same((await lookup.drop_select([1])).key, noise(MIB))  # type: ignore[arg-type]


async def test_a_link_that_is_cut_is_connected_again(pair: NcclBuffers) -> None:
    pair.ours.process.nccl.is_silent = True
    await pair.buffer.insert([1], None, noise(MIB), None, None)
    select = asyncio.create_task(pair.peer.lookup.drop_select([1]))
    await until(lambda: pair.near_way.transport.receiver.is_busy)
    pair.ours.process.nccl.is_silent = False
    pair.peer._linked().abort()
    assert is_same((await select).key, noise(MIB))  # type: ignore[arg-type]
    assert pair.peer.transport == "nccl" and pair.has_moved
