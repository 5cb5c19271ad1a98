"""Entries of a buffer on one GPU for a peer on another one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import torch

from asynckv.abc import KVEntry
from asynckv.buffers.lookup import LookupBuffer
from asynckv.errors import PeerLost
from asynckv.testing.blocked import until
from asynckv.testing.cancellation import CancelMode, Outcome, sweep_cancellation
from asynckv.testing.expectations import is_same, only
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


async def test_an_entry_goes_from_gpu_to_gpu(pair: NcclBuffers) -> None:
    await fill(pair.buffer)
    entry = await pair.peer.lookup.drop_select([1])
    assert isinstance(entry.key, torch.Tensor) and isinstance(
        entry.hidden, torch.Tensor
    )
    assert str(entry.key.device) == str(entry.hidden.device) == "cuda:1"
    assert is_same(entry.key, noise(MIB)) and is_same(entry.hidden, noise(8))
    assert pair.peer.transport == "nccl" and pair.has_moved


async def test_an_entry_lands_where_the_caller_wants_it(pair: NcclBuffers) -> None:
    await fill(pair.buffer)
    key = pair.theirs.tensor(torch.zeros(MIB, dtype=torch.uint8))
    hidden = pair.theirs.tensor(torch.zeros(8, dtype=torch.uint8))
    into = {"key": key, "hidden": hidden}
    entry = await pair.peer.lookup.drop_select([1], into=into)
    assert entry.key is key and entry.hidden is hidden
    assert is_same(key, noise(MIB)) and is_same(hidden, noise(8))


async def test_an_entry_that_is_borrowed_goes_from_gpu_to_gpu(
    pair: NcclBuffers,
) -> None:
    await fill(pair.buffer)
    async with pair.peer.lookup.drop_select([1]) as entry:
        assert isinstance(entry.key, torch.Tensor) and entry.key.is_cuda
        assert is_same(entry.key, noise(MIB))
        assert pair.buffer.statistics().entries == 1
    assert pair.buffer.statistics().entries == 0


async def test_layers_go_from_gpu_to_gpu_as_they_come(pair: NcclBuffers) -> None:
    specs = {"key": TensorSpec((MIB,), "uint8"), "hidden": TensorSpec((MIB,), "uint8")}
    async with (
        pair.buffer.open_insert([1], None, specs) as writer,
        pair.peer.lookup.open_drop_select([1]) as stream,
    ):
        for salt, name in enumerate(specs, 1):
            await writer.put(name, noise(MIB, salt))
            found = await stream.wait_for(name)
            assert found.is_cuda and is_same(found, noise(MIB, salt))


async def test_a_cancelled_select_gives_the_entry_back(pair: NcclBuffers) -> None:
    async def check(k: int, mode: CancelMode, outcome: Outcome[KVEntry]) -> None:
        if outcome.cancelled:
            entry = await pair.peer.lookup.drop_select([1])
            assert isinstance(entry.key, torch.Tensor)
            assert is_same(entry.key, noise(MIB)) and is_same(entry.hidden, noise(8))

    select, buffer = pair.peer.lookup.drop_select, pair.buffer
    await sweep_cancellation(lambda: select([1]), check, before=lambda: fill(buffer))
    await until(lambda: not buffer.statistics().used_bytes)
    assert pair.peer.transport == "nccl"


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


async def test_a_query_whose_route_is_lost_keeps_its_entry_and_its_place_in_line(
    pair: NcclBuffers,
) -> None:
    await pair.opened()
    lookup = pair.peer.lookup
    pair.ours.process.nccl.is_silent = True
    for number in (1, 2):
        await pair.buffer.insert([1], None, noise(MIB, number), None, None)
    taking = asyncio.create_task(lookup.drop_select([1]))
    await until(lambda: pair.near_way.transport.receiver.is_busy)
    pair.near_way._stalled(PeerLost("nothing has come for long"))
    entry = await taking
    assert is_same(only(entry.key), noise(MIB, 1)) and entry.attempt == 1
    assert is_same(only((await lookup.drop_select([1])).key), noise(MIB, 2))


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
