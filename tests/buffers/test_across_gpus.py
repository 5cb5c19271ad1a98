"""Entries on a GPU for peers that have none; and what peers on a GPU get by sockets."""

from __future__ import annotations

import weakref
from collections.abc import AsyncIterator, Mapping
from typing import Any, Final

import pytest
import torch

from asynckv.abc import KVEntry
from asynckv.buffers.entries.entries import EntryState, StoredEntry
from asynckv.buffers.lookup import LookupBuffer
from asynckv.buffers.remote.peer import Peer, connect
from asynckv.devices.arena import place_of
from asynckv.devices.cuda import DeviceMemory
from asynckv.errors import ChecksumError, GPUFailed, LeaseLost
from asynckv.tensors.views import empty_tensor
from asynckv.testing.blocked import until
from asynckv.testing.cancellation import CancelMode, Outcome, sweep_cancellation
from asynckv.testing.expectations import is_same, only
from asynckv.testing.lookup_checks.values import (
    LOOKUP_MAX_BYTES,
    MIB,
    LookupCheck,
    noise,
)
from asynckv.testing.lookup_conformance import LOOKUP_CHECKS
from asynckv.transfers.incoming import Incoming
from asynckv.types import TensorSpec
from harness.fake_devices import FakeDevice
from harness.fake_gpus import FakeGpus
from harness.gpu_pairs import GpuPair, open_gpu_pair

SMALL = 64 * 1024
WAYS: Final[Mapping[str, Mapping[str, Any]]] = {
    "cuda_ipc": {},
    "inline": {"device": None},
    "inline to a GPU": {"theirs": 1, "url": "?payload=inline"},
}
# Of these every check runs for a release; tests of single routes run always.
OTHERS = ("cuda_ipc", "inline")
LAYERS = {"key": TensorSpec((MIB,), "uint8"), "hidden": TensorSpec((8,), "uint8")}


@pytest.fixture
async def pair(gpus: FakeGpus) -> AsyncIterator[GpuPair]:
    """A buffer on a GPU, and a peer that has none, nor maps memory."""
    async with open_gpu_pair(gpus, device=None, url="?payload=inline") as pair:
        yield pair


def is_on_gpu(entry: StoredEntry) -> bool:
    return any(region.is_on_device for region in entry.regions)


async def fill(buffer: LookupBuffer) -> None:
    """Insert a large tensor and a small one."""
    await buffer.insert([1], None, noise(MIB), None, noise(8))


async def test_large_and_small_parts_of_a_gpu_come_through_host_memory(
    pair: GpuPair,
) -> None:
    await fill(pair.buffer)
    entry = await pair.peer.lookup.drop_select([1])
    assert isinstance(entry.key, torch.Tensor) and not entry.key.is_cuda
    assert is_same(only(entry.key), noise(MIB)) and is_same(entry.hidden, noise(8))


@pytest.mark.parametrize("way", [{"device": None}, {"theirs": 1, "their_nccl": 1}])
async def test_what_no_way_leads_to_lands_where_the_caller_wants_it(
    two_gpus: FakeGpus, way: Mapping[str, Any]
) -> None:
    async with open_gpu_pair(two_gpus, **way) as pair:
        assert pair.peer.transport == "inline"
        into = {"key": torch.zeros(MIB, dtype=torch.uint8)}
        if "theirs" in way:
            into["key"] = pair.theirs.tensor(into["key"])
        for _ in range(2):
            await fill(pair.buffer)
            async with pair.peer.lookup.drop_select([1], into=into) as entry:
                assert entry.key is into["key"]
            assert is_same(into["key"], noise(MIB))
            into["key"].zero_()
        assert not pair.buffer.statistics().mapped_by


async def test_bytes_that_changed_on_the_gpu_are_refused_by_who_gets_them(
    pair: GpuPair,
) -> None:
    await fill(pair.buffer)
    (entry,) = pair.buffer.ledger.table.entries.values()
    part = next(part for part in entry.parts if part.name == "key")
    assert part.region is not None
    place = place_of(part.region, part.spec)
    assert isinstance(place, DeviceMemory)
    pair.ours.process.cuda.view(place)[MIB // 2] ^= 1
    with pytest.raises(ChecksumError):
        await pair.peer.lookup.drop_select([1])
    await until(lambda: not pair.buffer.statistics().leased)


async def test_large_and_small_parts_get_to_a_gpu_through_host_memory(
    pair: GpuPair,
) -> None:
    await pair.peer.lookup.insert([1], None, noise(MIB), None, noise(8))
    entry = await pair.buffer.drop_select([1])
    assert isinstance(entry.key, torch.Tensor) and entry.key.is_cuda
    assert is_same(only(entry.key), noise(MIB)) and is_same(entry.hidden, noise(8))


async def test_a_stream_from_a_gpu_comes_through_host_memory(pair: GpuPair) -> None:
    await fill(pair.buffer)
    async with pair.peer.lookup.open_drop_select([1]) as stream:
        assert is_same(await stream.wait_for("hidden"), noise(8))
        assert is_same(await stream.wait_for("key"), noise(MIB))


async def test_a_cancelled_select_reads_nothing_more_from_the_gpu(
    pair: GpuPair,
) -> None:
    async def check(k: int, mode: CancelMode, outcome: Outcome[KVEntry]) -> None:
        if outcome.cancelled:
            entry = await pair.peer.lookup.drop_select([1])
            assert is_same(entry.hidden, noise(8))

    select, buffer = pair.peer.lookup.drop_select, pair.buffer
    await sweep_cancellation(lambda: select([1]), check, before=lambda: fill(buffer))
    await until(lambda: not buffer.statistics().used_bytes)


async def test_a_cancelled_insert_leaves_no_trace_on_the_gpu(pair: GpuPair) -> None:
    entries = pair.buffer.ledger.table.entries

    async def check(k: int, mode: CancelMode, outcome: Outcome[str]) -> None:
        await pair.peer.lookup.peek([1])  # all that was said before is heard
        await until(lambda: all(e.state is EntryState.READY for e in entries.values()))
        assert entries or outcome.cancelled
        if entries:
            entry = await pair.buffer.drop_select([1])
            assert is_same(entry.hidden, noise(8))
            del entry
        await until(lambda: not pair.buffer.statistics().used_bytes)

    insert = pair.peer.lookup.insert
    key, hidden = noise(MIB), noise(8)
    await sweep_cancellation(lambda: insert([1], None, key, None, hidden), check)


async def test_who_waits_for_an_entry_that_its_gpu_has_lost_is_told(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    pair: GpuPair,
) -> None:
    def fail(*anything: object) -> None:
        raise GPUFailed("it has fallen off the bus")

    await fill(pair.buffer)
    with monkeypatch.context() as patch:
        patch.setattr(pair.ours.process.cuda, "copy", fail)
        with pytest.raises(GPUFailed, match="off the bus"):
            await pair.peer.lookup.drop_select([1])
    assert "cannot be sent" in caplog.text
    caplog.clear()
    assert is_same((await pair.peer.lookup.drop_select([1])).hidden, noise(8))


async def test_layers_of_a_peer_get_to_a_gpu_as_they_come(pair: GpuPair) -> None:
    async with (
        pair.peer.lookup.open_insert([1], None, LAYERS) as writer,
        pair.buffer.open_drop_select([1]) as stream,
    ):
        for salt, (name, spec) in enumerate(LAYERS.items(), 1):
            await writer.put(name, noise(spec.nbytes, salt))
            found = await stream.wait_for(name)
            assert found.is_cuda and is_same(found, noise(spec.nbytes, salt))


async def test_a_cancelled_put_of_a_layer_may_be_made_again(pair: GpuPair) -> None:
    async with pair.peer.lookup.open_insert([1], None, LAYERS) as writer:
        is_put = False

        async def put() -> None:
            if not is_put:
                await writer.put("key", noise(MIB, 3))

        async def check(k: int, mode: CancelMode, outcome: Outcome[None]) -> None:
            nonlocal is_put
            is_put = not outcome.cancelled

        await sweep_cancellation(put, check, modes=("task",))
        await writer.put("hidden", noise(8))
    assert is_same(only((await pair.buffer.drop_select([1])).key), noise(MIB, 3))


async def test_a_layer_that_its_gpu_refuses_fails_its_writer(
    monkeypatch: pytest.MonkeyPatch, pair: GpuPair
) -> None:
    def fail(*anything: object) -> None:
        raise GPUFailed("it has fallen off the bus")

    with monkeypatch.context() as patch:
        patch.setattr(pair.ours.process.cuda, "copy", fail)
        with pytest.raises(GPUFailed, match="off the bus"):
            async with pair.peer.lookup.open_insert([1], None, LAYERS) as writer:
                await writer.put("key", noise(MIB))
                await writer.put("hidden", noise(8))
    await until(lambda: not pair.buffer.statistics().used_bytes)


async def test_an_entry_that_is_taken_early_needs_no_more_layers(pair: GpuPair) -> None:
    async with pair.peer.lookup.open_insert([1], None, LAYERS) as writer:
        async with pair.buffer.open_drop_select([1]):
            await writer.put("hidden", noise(8))
        await writer.put("key", noise(MIB))
    await until(lambda: not pair.buffer.statistics().used_bytes)


async def test_a_stream_by_lanes_is_lifted_to_the_gpu_once(
    local: LookupBuffer, on_gpu: tuple[FakeDevice, Peer]
) -> None:
    await fill(local)
    async with on_gpu[1].lookup.open_drop_select([1]) as stream:
        found = {name: tensor async for name, tensor in stream}
        assert all(tensor.is_cuda for tensor in found.values())
        assert is_same(found["key"], noise(MIB)) and is_same(found["hidden"], noise(8))
        assert await stream.wait_for("key") is found["key"]


async def test_a_stream_lands_where_the_caller_wants_it(
    local: LookupBuffer, on_gpu: tuple[FakeDevice, Peer]
) -> None:
    gpu, peer = on_gpu
    await fill(local)
    there = gpu.tensor(torch.zeros(MIB, dtype=torch.uint8))
    into = {"key": there, "hidden": torch.zeros(8, dtype=torch.uint8)}
    async with peer.lookup.open_drop_select([1], into=into) as stream:
        found = {name: tensor async for name, tensor in stream}
    assert found["key"] is there and is_same(there, noise(MIB))
    assert is_same(into["hidden"], noise(8)) and not found["hidden"].is_cuda


async def test_a_place_on_the_gpu_that_does_not_fit_gives_the_entry_back(
    local: LookupBuffer, on_gpu: tuple[FakeDevice, Peer]
) -> None:
    gpu, peer = on_gpu
    await fill(local)
    with pytest.raises(ValueError, match="key"):
        await peer.lookup.drop_select([1], into={"key": gpu.tensor(noise(8))})
    await until(lambda: not local.statistics().leased)
    assert is_same((await peer.lookup.drop_select([1])).hidden, noise(8))


async def test_of_a_layer_that_is_on_the_gpu_the_host_keeps_nothing(
    pair: GpuPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, copies = pair.buffer.pool, list[weakref.ref[torch.Tensor]]()

    def note(spec: TensorSpec) -> torch.Tensor:
        copies.append(weakref.ref(copy := empty_tensor(spec)))
        return copy

    monkeypatch.setattr(pool, "host_empty", note)
    async with pair.peer.lookup.open_insert([1], None, LAYERS) as writer:
        await writer.put("key", noise(MIB))
        (entry,) = pair.buffer.ledger.table.entries.values()
        await until(lambda: 0 in entry.landed)
        await until(lambda: copies[0]() is None)
        await writer.put("hidden", noise(8))


async def test_an_entry_that_leaves_while_a_layer_is_lifted_needs_it_no_more(
    monkeypatch: pytest.MonkeyPatch, pair: GpuPair
) -> None:
    copy, leases = Incoming._copy_soon, pair.buffer.ledger.leases

    def copy_too_late(incoming: Incoming, part: int) -> None:
        (entry,) = pair.buffer.ledger.table.entries.values()
        leases.acknowledge(next(iter(entry.leases.values())))
        copy(incoming, part)

    monkeypatch.setattr(Incoming, "_copy_soon", copy_too_late)
    async with pair.peer.lookup.open_insert([1], None, LAYERS) as writer:
        with pytest.raises(LeaseLost):
            async with pair.buffer.open_drop_select([1]):
                await writer.put("key", noise(MIB))
                await until(lambda: not pair.buffer.ledger.table.entries)
        await writer.put("hidden", noise(8))
    await until(lambda: not pair.buffer.statistics().used_bytes)


async def test_small_entries_get_to_and_from_a_gpu_that_holds_many_of_them(
    pair: GpuPair,
) -> None:
    count = 4 * MIB // SMALL + 8  # more than stay in host memory
    for number in range(count):
        await pair.peer.lookup.insert([number], None, noise(SMALL, number), None, None)
    on_gpu = [e for e in pair.buffer.ledger.table.entries.values() if is_on_gpu(e)]
    assert len(on_gpu) >= 8
    for number in range(count):
        entry = await pair.peer.lookup.drop_select([number])
        assert is_same(only(entry.key), noise(SMALL, number))


async def test_small_layers_get_to_a_gpu_that_holds_many(pair: GpuPair) -> None:
    for number in range(4 * MIB // SMALL):
        await pair.buffer.insert([number], None, noise(SMALL, 1), None, None)
    specs = {"key": TensorSpec((SMALL,), "uint8")}
    async with pair.peer.lookup.open_insert([777], None, specs) as writer:
        await writer.put("key", noise(SMALL, 7))
    assert is_on_gpu(pair.buffer.ledger.table.entries[writer.entry_id])
    assert is_same(only((await pair.buffer.drop_select([777])).key), noise(SMALL, 7))


@pytest.mark.parametrize(
    "way",
    [
        "inline to a GPU",
        *(pytest.param(way, marks=pytest.mark.chaos) for way in OTHERS),
    ],
)
@pytest.mark.parametrize("check", LOOKUP_CHECKS, ids=lambda check: check.__name__)
async def test_a_served_lookup_on_a_gpu_keeps_what_every_one_keeps(
    two_gpus: FakeGpus, check: LookupCheck, way: str
) -> None:
    async with (
        open_gpu_pair(two_gpus, buffer_bytes=LOOKUP_MAX_BYTES, **WAYS[way]) as pair,
        connect(pair.server.url) as producer,
    ):
        assert pair.peer.transport == way.partition(" ")[0]
        await check(producer.lookup, pair.peer.lookup, pair.buffer)


async def test_what_is_borrowed_from_another_gpu_is_a_copy(two_gpus: FakeGpus) -> None:
    two_gpus.has_peer_access = True
    async with open_gpu_pair(two_gpus, theirs=1) as pair:
        await fill(pair.buffer)
        async with pair.peer.lookup.drop_select([1]) as entry:
            assert pair.peer.transport == "cuda_ipc" and pair.opened == 1
            await until(lambda: not pair.buffer.statistics().mapped_by)
            assert only(entry.key).device == torch.device("cuda", 1)
            assert is_same(only(entry.key), noise(MIB))
        assert not pair.peer.lookup.shows_gpu_memory


async def test_it_is_known_whether_a_peers_memory_is_read_where_it_lies(
    gpus: FakeGpus, pair: GpuPair
) -> None:
    assert not pair.peer.lookup.shows_gpu_memory
    async with open_gpu_pair(gpus) as shared:
        assert shared.peer.lookup.shows_gpu_memory
        shared.peer.abort()
        assert not shared.peer.lookup.shows_gpu_memory
