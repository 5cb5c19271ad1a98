"""Entries of a buffer on one GPU for a peer on another one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import torch

from asynckv.buffers.lookup import LookupBuffer
from asynckv.errors import PeerLost
from asynckv.testing.blocked import until
from asynckv.testing.expectations import is_same
from asynckv.testing.lookup_checks.values import MIB, noise
from asynckv.types import TensorSpec
from harness.fake_gpus import FakeGpus
from harness.fake_gpus.streams import Delay
from harness.nccl_buffer_pairs import NcclBuffers, open_nccl_buffers


@pytest.fixture
async def pair(two_gpus: FakeGpus) -> AsyncIterator[NcclBuffers]:
    async with open_nccl_buffers(two_gpus) as pair:
        yield pair


async def fill(buffer: LookupBuffer) -> None:
    """Insert a large tensor and a small one."""
    await buffer.insert([1], None, noise(MIB), None, noise(8))


async def test_an_insert_that_waits_for_room_goes_to_the_gpu_by_lanes(
    pair: NcclBuffers,
) -> None:
    await pair.buffer.insert([1], None, noise(12 * MIB), None, None)
    waiting = asyncio.create_task(
        pair.buffer.insert([2], None, noise(8 * MIB), None, None)
    )
    await until(lambda: pair.buffer.statistics().waiting_inserts == 1)
    entry = await pair.peer.lookup.drop_select([2])
    await waiting
    assert isinstance(entry.key, torch.Tensor) and entry.key.is_cuda
    assert is_same(entry.key, noise(8 * MIB)) and not pair.has_moved


async def test_what_is_wanted_in_host_memory_goes_there(pair: NcclBuffers) -> None:
    await fill(pair.buffer)
    into = {"key": torch.zeros(MIB, dtype=torch.uint8)}
    entry = await pair.peer.lookup.drop_select([1], into=into)
    assert entry.key is into["key"] and is_same(into["key"], noise(MIB))
    assert not pair.has_moved and pair.peer.transport == "nccl"


async def test_a_link_may_be_cut_while_a_place_is_waited_for(pair: NcclBuffers) -> None:
    await fill(pair.buffer)
    into = {"key": pair.theirs.tensor(torch.zeros(MIB, dtype=torch.uint8))}
    pair.theirs.tensors.stream(1).add(Delay(500))
    lookup = pair.peer.lookup
    select = asyncio.create_task(lookup.drop_select([1], into=into))
    await until(lambda: bool(pair.peer.budget.used_bytes))
    pair.peer._linked().abort()
    assert (await select).key is into["key"] and is_same(into["key"], noise(MIB))
    assert not pair.peer.budget.used_bytes


async def test_a_layer_that_was_handed_out_is_not_written_again_when_its_route_is_lost(
    pair: NcclBuffers,
) -> None:
    await pair.opened()
    layers = {name: TensorSpec((MIB,), "uint8") for name in ("key", "value")}
    async with (
        pair.buffer.open_insert([1], None, layers) as writer,
        pair.peer.lookup.open_drop_select([1]) as stream,
    ):
        await writer.put("key", noise(MIB, 1))
        key = await stream.wait_for("key")
        key.fill_(9)
        pair.ours.process.nccl.is_silent = True
        await writer.put("value", noise(MIB, 2))
        await until(lambda: pair.near_way.transport.receiver.is_busy)
        pair.near_way._stalled(PeerLost("nothing has come for long"))
        assert is_same(await stream.wait_for("value"), noise(MIB, 2))
        assert bool((key == 9).all()) and stream.attempt == 1
