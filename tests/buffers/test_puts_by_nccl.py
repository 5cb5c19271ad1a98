"""What a peer on one GPU puts into buffers on another one."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable
from functools import partial

import pytest
import torch

from asynckv.buffers.lookup import LookupBuffer
from asynckv.buffers.remote import connect
from asynckv.buffers.serve import serve
from asynckv.buffers.serve_insert import ServedInsert
from asynckv.buffers.store import StoreBuffer
from asynckv.errors import ChecksumError, EntryConflict, GPUFailed, PeerLost
from asynckv.links.options import Digest
from asynckv.protocol.device_frames import SentDevices
from asynckv.protocol.frames import Frame
from asynckv.tensors.blocks import KVBlocks
from asynckv.testing.blocked import until, until_blocked
from asynckv.testing.expectations import is_same
from asynckv.testing.fake_devices import fake_device_of
from asynckv.testing.fake_gpus import FakeGpus
from asynckv.testing.gpu_stores import GpuStores, open_gpu_stores
from asynckv.testing.lookup_checks.values import (
    LOOKUP_MAX_BYTES,
    MIB,
    LookupCheck,
    noise,
)
from asynckv.testing.lookup_conformance import LOOKUP_CHECKS
from asynckv.testing.nccl_buffer_pairs import NcclBuffers, open_nccl_buffers
from asynckv.transports.nccl.parts import DevicePart
from asynckv.types import TensorSpec

LAYERS = {"key": TensorSpec((MIB,), "uint8"), "hidden": TensorSpec((8,), "uint8")}
PIECE = 32 * 1024
"""Too long to ride, and too short to be a value's own."""


@pytest.fixture
async def pair(two_gpus: FakeGpus) -> AsyncIterator[NcclBuffers]:
    async with open_nccl_buffers(two_gpus) as pair:
        await pair.opened()
        yield pair


@pytest.fixture
async def stores(two_gpus: FakeGpus) -> AsyncIterator[GpuStores]:
    async with open_gpu_stores(two_gpus, theirs=1) as pair:
        await pair.opened()
        yield pair


def only(tensor: object) -> torch.Tensor:
    assert isinstance(tensor, torch.Tensor)
    return tensor


async def insert(pair: NcclBuffers, salt: int = 1, entry_id: str | None = None) -> None:
    """Insert a large tensor and a small one, both of the peer's GPU."""
    tensor = pair.theirs.tensor
    await pair.peer.lookup.insert(
        *([1], None, tensor(noise(MIB, salt)), None, tensor(noise(8))),
        entry_id=entry_id,
    )


async def check_is_in(pair: NcclBuffers, salt: int = 1) -> None:
    """The entry is there, once, on its GPU; and neither side keeps anything of it."""
    entry = await pair.buffer.drop_select([1])
    assert only(entry.key).is_cuda and is_same(only(entry.key), noise(MIB, salt))
    assert is_same(entry.hidden, noise(8))
    del entry
    await pair.emptied()


async def test_an_entry_goes_from_gpu_to_gpu(pair: NcclBuffers) -> None:
    await insert(pair)
    assert pair.has_put
    await check_is_in(pair)


async def test_what_has_come_is_sent_on_with_its_digest(pair: NcclBuffers) -> None:
    await insert(pair)
    (entry,) = pair.buffer.ledger.book.entries.values()
    assert all(part.digest for part in entry.parts)
    found = await pair.peer.lookup.drop_select([1])
    assert is_same(only(found.key), noise(MIB, 1)) and pair.has_moved


async def test_each_tensor_goes_wherever_it_is(pair: NcclBuffers) -> None:
    gpu, host = pair.theirs.tensor, noise(MIB, 2).view(4, -1)
    pool = gpu(noise(MIB, 3).view(8, -1))
    await pair.peer.lookup.insert(
        [1],
        None,
        {"a": gpu(noise(MIB, 1)), "b": host, "c": KVBlocks(pool, [5, 1, 2])},
        {"a": gpu(noise(MIB, 4).view(16, -1)).t(), "b": KVBlocks(host, [3, 0])},
        gpu(noise(8)),
        extras={"little": noise(9), "some": gpu(noise(PIECE, 5))},
    )
    assert pair.has_put
    await until(lambda: not pair.staged_bytes)
    entry = await pair.buffer.drop_select([1])
    assert isinstance(entry.key, dict) and isinstance(entry.value, dict)
    assert is_same(entry.key["a"], noise(MIB, 1)) and is_same(entry.key["b"], host)
    assert is_same(entry.key["c"], noise(MIB, 3).view(8, -1)[[5, 1, 2]])
    assert is_same(entry.value["a"], noise(MIB, 4).view(16, -1).t().contiguous())
    assert is_same(entry.value["b"], host[[3, 0]])
    assert is_same(entry.extras["little"], noise(9))
    assert is_same(entry.extras["some"], noise(PIECE, 5))


async def test_what_has_no_room_on_the_way_goes_from_host_memory(
    two_gpus: FakeGpus,
) -> None:
    async with open_nccl_buffers(two_gpus, max_bytes=MIB // 2) as pair:
        await pair.opened()
        await insert(pair)
        assert pair.has_put
        await check_is_in(pair)


async def test_tensors_of_another_gpu_go_from_host_memory(
    two_gpus: FakeGpus,
) -> None:
    async with open_nccl_buffers(two_gpus) as pair:
        await pair.opened()
        other = fake_device_of(pair.theirs.process, 0)
        key = other.tensor(noise(MIB))
        await pair.peer.lookup.insert([1], None, key, None, None)
        entry = await pair.buffer.drop_select([1])
        assert is_same(only(entry.key), noise(MIB)) and pair.has_put


async def test_few_bytes_ride_with_their_frame(pair: NcclBuffers) -> None:
    key = pair.theirs.tensor(noise(PIECE))
    await pair.peer.lookup.insert([1], None, key, None, None)
    assert is_same(only((await pair.buffer.drop_select([1])).key), noise(PIECE))
    assert not pair.has_put


async def test_a_value_goes_from_gpu_to_gpu(stores: GpuStores) -> None:
    await stores.peer.store.put("key", stores.theirs.tensor(noise(MIB, 2)))
    assert stores.has_put
    value = await stores.store.get("key")
    assert value is not None and value.is_cuda and is_same(value, noise(MIB, 2))
    pinned = stores.store.lookup("key", None)
    assert pinned is not None and pinned.digest and pinned.region.is_on_device
    stores.store.release(pinned)


async def test_layers_go_from_gpu_to_gpu_and_are_shown_at_once(
    pair: NcclBuffers,
) -> None:
    async with (
        pair.peer.lookup.open_insert([1], None, LAYERS) as writer,
        pair.buffer.open_drop_select([1]) as stream,
    ):
        for salt, (name, spec) in enumerate(LAYERS.items(), 1):
            await writer.put(name, pair.theirs.tensor(noise(spec.nbytes, salt)))
            found = await stream.wait_for(name)
            assert found.is_cuda and is_same(found, noise(spec.nbytes, salt))
    assert pair.has_put
    await pair.emptied()


async def test_a_layer_in_host_memory_goes_by_both_gpus(pair: NcclBuffers) -> None:
    async with pair.peer.lookup.open_insert([1], None, LAYERS) as writer:
        await writer.put("key", noise(MIB, 1))
        await writer.put("hidden", noise(8))
    assert pair.has_put
    await check_is_in(pair)


async def test_what_is_for_host_memory_gets_there(two_gpus: FakeGpus) -> None:
    here = fake_device_of(two_gpus.process()).device
    there = fake_device_of(two_gpus.process(), 1)
    async with (
        LookupBuffer("4MiB", drain_s=0) as lookup,
        StoreBuffer("4MiB", device=here) as store,
        serve("tcp://127.0.0.1:0", lookup=lookup, store=store) as server,
        connect(server.url, device=there.device, max_bytes="8MiB") as peer,
    ):
        assert peer.transport == "nccl"
        key = there.tensor(noise(MIB, 1))
        await peer.lookup.insert([1], None, key, noise(MIB, 2), noise(8))
        async with peer.lookup.open_insert([2], None, LAYERS) as writer:
            await writer.put("key", key)
            await writer.put("hidden", noise(8))
        way = peer.way(peer._linked())
        assert way is not None and not way.transport.sender._sending._next
        for tokens in ([1], [2]):
            entry = await lookup.drop_select(tokens)
            assert is_same(only(entry.key), noise(MIB, 1))
            assert is_same(entry.hidden, noise(8))


@pytest.mark.parametrize("digest", ["full", "edges", "off"])
async def test_an_entry_is_known_again_whatever_is_compared(
    two_gpus: FakeGpus, digest: Digest
) -> None:
    async with open_nccl_buffers(two_gpus, serves=digest, digest=digest) as pair:
        await pair.opened()
        await insert(pair, entry_id="it")
        assert pair.has_put
        await insert(pair, entry_id="it")
        if digest != "off":
            with pytest.raises(EntryConflict):
                await insert(pair, 2, entry_id="it")
        await check_is_in(pair)


async def test_an_insert_that_was_selected_while_it_waited_comes_again_with_room(
    pair: NcclBuffers,
) -> None:
    other = await pair.buffer.insert([2], None, noise(15 * MIB), None, None)
    inserting = asyncio.create_task(insert(pair))
    await until(lambda: pair.buffer.statistics().waiting_inserts == 1)
    with pytest.raises(ZeroDivisionError):
        async with pair.buffer.drop_select([1]) as entry:
            assert is_same(only(entry.key), noise(MIB, 1))
            del entry
            raise ZeroDivisionError
    assert not pair.has_put
    assert await pair.buffer.withdraw(other)
    await inserting
    assert pair.has_put
    await check_is_in(pair)


async def wrong(*anything: object) -> list[bytes]:
    return [b"of other bytes.."]


async def test_other_bytes_than_were_sent_are_not_inserted(
    monkeypatch: pytest.MonkeyPatch, pair: NcclBuffers
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(pair.peer.pool, "digest", wrong)
        with pytest.raises(ChecksumError):
            await insert(pair)
        with pytest.raises(ChecksumError):
            async with pair.peer.lookup.open_insert([1], None, LAYERS) as writer:
                await writer.put("key", pair.theirs.tensor(noise(MIB)))
    await pair.emptied()
    assert pair.peer.transport == "nccl"
    await insert(pair)
    await check_is_in(pair)


async def test_other_bytes_than_were_sent_are_not_stored(
    monkeypatch: pytest.MonkeyPatch, stores: GpuStores
) -> None:
    await stores.store.put("key", noise(MIB, 1))
    with monkeypatch.context() as patch:
        patch.setattr(stores.peer.pool, "digest", wrong)
        with pytest.raises(ChecksumError):
            await stores.peer.store.put("key", stores.theirs.tensor(noise(MIB, 2)))
    assert is_same(await stores.store.get("key"), noise(MIB, 1))
    assert stores.store.statistics().used_bytes == MIB


async def stuck(pair: NcclBuffers, putting: asyncio.Task[None]) -> None:
    """Wait until a put is under way, and does not go on."""
    await until(lambda: pair.way.transport.receiver.is_busy or putting.done())
    await until_blocked(putting)
    assert not putting.done()


@pytest.mark.parametrize("end", ["way", "near_way"])
async def test_an_insert_whose_way_breaks_goes_on_through_host_memory(
    pair: NcclBuffers, end: str
) -> None:
    pair.theirs.process.nccl.is_silent = True
    inserting = asyncio.create_task(insert(pair))
    await stuck(pair, inserting)
    assert pair.staged_bytes == MIB
    getattr(pair, end)._stalled(PeerLost("nothing has come for long"))
    await inserting
    assert pair.peer.transport == "inline"
    await check_is_in(pair)


@pytest.mark.parametrize("end", ["way", "near_way"])
async def test_a_layer_whose_way_breaks_goes_on_through_host_memory(
    pair: NcclBuffers, end: str
) -> None:
    pair.theirs.process.nccl.is_silent = True
    async with pair.peer.lookup.open_insert([1], None, LAYERS) as writer:
        key = pair.theirs.tensor(noise(MIB, 1))
        putting = asyncio.create_task(writer.put("key", key))
        await stuck(pair, putting)
        assert pair.staged_bytes == MIB
        getattr(pair, end)._stalled(PeerLost("nothing has come for long"))
        await putting
        await writer.put("hidden", noise(8))
    await check_is_in(pair)


async def test_a_layer_in_host_memory_is_read_no_more_when_its_put_has_ended(
    pair: NcclBuffers, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, returns, enter = list[DevicePart](), threading.Event(), DevicePart._enter

    def keep(part: DevicePart, start: int, end: int) -> list[memoryview]:
        pieces = enter(part, start, end)
        reading.append(part)
        returns.wait(60)
        return pieces

    async with pair.peer.lookup.open_insert([1], None, LAYERS) as writer:
        monkeypatch.setattr(DevicePart, "_enter", keep)
        putting = asyncio.create_task(writer.put("key", noise(MIB, 1)))
        await until(lambda: bool(reading))
        pair.way._stalled(PeerLost("nothing has come for long"))
        (pushing,) = writer._pushing.values()  # type: ignore[attr-defined]
        await until(lambda: pushing.is_left)
        await until_blocked(putting)
        is_early = putting.done()
        returns.set()
        await putting
        assert not is_early and not any(part.is_touched for part in reading)
        await writer.put("hidden", noise(8))
    await check_is_in(pair)


@pytest.mark.parametrize("what", ["insert", "layer", "select"])
async def test_what_nobody_says_was_sent_before_the_way_broke_is_asked_for_again(
    pair: NcclBuffers, what: str
) -> None:
    way = pair.way if what == "select" else pair.near_way
    ended = list[object]()
    way.transport.sender.on_done = ended.append  # type: ignore[method-assign, assignment]
    if what == "insert":
        moving = asyncio.create_task(insert(pair))
    elif what == "layer":
        moving = asyncio.create_task(put_layers(pair))
    else:
        await pair.buffer.insert([1], None, noise(MIB, 1), None, noise(8))
        moving = asyncio.create_task(select(pair))
    await until(lambda: bool(ended))
    way._stalled(PeerLost("nothing has come for long"))
    async with asyncio.timeout(10):
        await moving
    assert pair.peer.transport == "inline"
    if what != "select":
        await check_is_in(pair)


async def put_layers(pair: NcclBuffers) -> None:
    async with pair.peer.lookup.open_insert([1], None, LAYERS) as writer:
        await writer.put("key", pair.theirs.tensor(noise(MIB, 1)))
        await writer.put("hidden", noise(8))


async def select(pair: NcclBuffers) -> None:
    entry = await pair.peer.lookup.drop_select([1])
    assert is_same(only(entry.key), noise(MIB, 1))


async def test_what_was_whole_when_the_way_broke_is_told_of_once(
    monkeypatch: pytest.MonkeyPatch, pair: NcclBuffers
) -> None:
    late, on_frame = list[Callable[[], None]](), ServedInsert.on_frame

    def hold_back(served: ServedInsert, frame: Frame, body: bytes) -> None:
        hear = partial(on_frame, served, frame, body)
        if isinstance(frame, SentDevices) and frame.part == 1:
            late.append(hear)
        else:
            hear()

    monkeypatch.setattr(ServedInsert, "on_frame", hold_back)
    key, value = (pair.theirs.tensor(noise(MIB, salt)) for salt in (1, 2))
    insert = pair.peer.lookup.insert
    inserting = asyncio.create_task(insert([1], None, key, value, noise(8)))
    await until(lambda: bool(late))
    (entry,) = pair.buffer.ledger.book.entries.values()
    await until(lambda: 0 in entry.landed)
    pair.way._stalled(PeerLost("nothing has come for long"))
    await until(lambda: pair.peer.transport == "inline")
    late[0]()
    await inserting
    assert sorted(entry.landed) == [0, 1, 2]
    found = await pair.buffer.drop_select([1])
    assert is_same(only(found.key), noise(MIB, 1))
    assert is_same(only(found.value), noise(MIB, 2))


@pytest.mark.parametrize("end", ["way", "near_way"])
async def test_a_put_whose_way_breaks_goes_on_through_host_memory(
    stores: GpuStores, end: str
) -> None:
    stores.theirs.process.nccl.is_silent = True
    near, (services,) = stores.peer.way(stores.peer._linked()), stores.server._services
    far = services.devices.way
    assert near is not None and far is not None
    value = stores.theirs.tensor(noise(MIB, 2))
    putting = asyncio.create_task(stores.peer.store.put("key", value))
    await until(lambda: far.transport.receiver.is_busy)
    (far if end == "way" else near)._stalled(PeerLost("nothing has come for long"))
    await putting
    assert is_same(await stores.store.get("key"), noise(MIB, 2))
    await until(lambda: stores.store.statistics().used_bytes == MIB)


@contextlib.asynccontextmanager
async def given_up(two_gpus: FakeGpus, end: str) -> AsyncIterator[NcclBuffers]:
    """What a worker that is given up there may touch is let go after all."""
    async with open_nccl_buffers(two_gpus) as pair:
        await pair.opened()
        pair.theirs.process.nccl.is_silent = True
        worker = getattr(pair, end).transport._worker
        yield pair
    for gpu in (pair.ours, pair.theirs):
        gpu.process.end()
    worker.kept.clear()  # as it would be for ever
    worker._flights.clear()


@pytest.mark.parametrize("end", ["way", "near_way"])
async def test_where_a_worker_that_is_given_up_may_write_nothing_is_put(
    two_gpus: FakeGpus, end: str
) -> None:
    async with given_up(two_gpus, end) as pair:
        inserting = asyncio.create_task(insert(pair))
        await stuck(pair, inserting)
        getattr(pair, end).transport._worker.give_up(GPUFailed("it is stuck"))
        if end == "way":
            with pytest.raises(GPUFailed, match="it is stuck"):
                await inserting
            await insert(pair)
        else:
            await inserting
        entry = await pair.buffer.drop_select([1])
        assert is_same(only(entry.key), noise(MIB, 1))


async def test_a_layer_of_a_worker_that_is_given_up_fails_its_writer(
    two_gpus: FakeGpus,
) -> None:
    async with given_up(two_gpus, "way") as pair:
        with pytest.raises(GPUFailed, match="it is stuck"):
            async with pair.peer.lookup.open_insert([1], None, LAYERS) as writer:
                key = pair.theirs.tensor(noise(MIB, 1))
                putting = asyncio.create_task(writer.put("key", key))
                await stuck(pair, putting)
                pair.way.transport._worker.give_up(GPUFailed("it is stuck"))
                await putting
        await insert(pair)
        entry = await pair.buffer.drop_select([1])
        assert is_same(only(entry.key), noise(MIB, 1))


async def test_a_link_that_is_cut_is_connected_again_and_the_entry_sent(
    pair: NcclBuffers,
) -> None:
    pair.theirs.process.nccl.is_silent = True
    inserting = asyncio.create_task(insert(pair))
    await stuck(pair, inserting)
    pair.theirs.process.nccl.is_silent = False
    pair.peer._linked().abort()
    await inserting
    assert pair.peer.transport == "nccl"
    await check_is_in(pair)


@pytest.mark.chaos
@pytest.mark.parametrize("check", LOOKUP_CHECKS, ids=lambda check: check.__name__)
async def test_a_served_lookup_on_another_gpu_keeps_what_every_one_keeps(
    two_gpus: FakeGpus, check: LookupCheck
) -> None:
    async with open_nccl_buffers(two_gpus, buffer_bytes=LOOKUP_MAX_BYTES) as pair:
        await pair.opened()
        there = fake_device_of(two_gpus.process(), 1).device
        async with connect(
            pair.server.url, device=there, max_bytes="16MiB"
        ) as producer:
            assert producer.transport == "nccl"
            await check(producer.lookup, pair.peer.lookup, pair.buffer)
