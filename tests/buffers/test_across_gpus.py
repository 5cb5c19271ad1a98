"""Entries on a GPU for peers on another one, by NCCL, or on none; and of the host."""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from functools import partial
from typing import Any, Final

import pytest
import torch

from asynckv import (
    GPUFailed,
    LeaseLost,
    LookupBuffer,
    Peer,
    PeerLost,
    StoreBuffer,
    TensorSpec,
    connect,
    serve,
)
from asynckv.buffers.entries.entries import StoredEntry
from asynckv.buffers.serving.insert import ServedInsert
from asynckv.protocol.frames import Frame
from asynckv.protocol.transfer_frames import Sent
from asynckv.tensors.views import empty_tensor
from asynckv.testing import LOOKUP_CHECKS, until, until_blocked
from asynckv.testing.expectations import is_same, only
from asynckv.testing.lookup_checks.values import (
    LOOKUP_MAX_BYTES,
    MIB,
    LookupCheck,
    noise,
)
from asynckv.testing.pairs import Scheme, new_url
from asynckv.transfers.incoming import Incoming
from harness.fake_devices import FakeDevice, fake_device
from harness.fake_gpus import FakeGpus
from harness.fake_gpus.streams import Delay
from harness.gpu_pairs import GpuPair, NcclBuffers, open_gpu_pair, open_nccl_buffers
from harness.gpu_puts import LAYERS, check_is_in, insert, put_layers

SMALL = 64 * 1024

WAYS: Final[Mapping[str, Mapping[str, Any]]] = {
    "cuda_ipc": {},
    "inline": {"device": None},
    "inline to a GPU": {"theirs": 1, "url": "?payload=inline"},
}

# Of these every check runs for a release; tests of single routes run always.
OTHERS = ("cuda_ipc", "inline")


@pytest.fixture
async def pair(gpus: FakeGpus) -> AsyncIterator[GpuPair]:
    """A buffer on a GPU, and a peer that has none, nor maps memory."""
    async with open_gpu_pair(gpus, device=None, url="?payload=inline") as pair:
        yield pair


async def fill(buffer: LookupBuffer) -> None:
    """Insert a large tensor and a small one."""
    await buffer.insert([1], None, noise(MIB), None, noise(8))


def is_on_gpu(entry: StoredEntry) -> bool:
    return any(region.is_on_device for region in entry.regions)


async def test_an_entry_that_is_taken_early_needs_no_more_layers(pair: GpuPair) -> None:
    async with pair.peer.lookup.open_insert([1], None, LAYERS) as writer:
        async with pair.buffer.open_drop_select([1]):
            await writer.put("hidden", noise(8))
        await writer.put("key", noise(MIB))
    await until(lambda: not pair.buffer.statistics().used_bytes)


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
        assert not pair.peer.lookup.reads_gpu_memory


async def test_it_is_known_whether_a_peers_memory_is_read_where_it_lies(
    gpus: FakeGpus, pair: GpuPair
) -> None:
    assert not pair.peer.lookup.reads_gpu_memory
    async with open_gpu_pair(gpus) as shared:
        assert shared.peer.lookup.reads_gpu_memory
        shared.peer.abort()
        assert not shared.peer.lookup.reads_gpu_memory


SIZES = [8, MIB]


@pytest.fixture
def gpu() -> Iterator[FakeDevice]:
    with fake_device(max_delay=2) as gpu:
        yield gpu


@pytest.fixture
async def store_near(gpu: FakeDevice) -> AsyncIterator[StoreBuffer]:
    async with StoreBuffer("8MiB") as store_near:
        store_near.pool.lanes = gpu.lanes()
        yield store_near


@pytest.fixture(params=["map", "tcp", "mem"])
async def near(
    request: pytest.FixtureRequest,
    gpu: FakeDevice,
    local: LookupBuffer,
    store_near: StoreBuffer,
) -> AsyncIterator[Peer]:
    scheme: Scheme = request.param
    async with (
        serve(new_url(scheme), lookup=local, store=store_near) as server,
        connect(server.url, max_bytes="8MiB") as near,
    ):
        near.pool.lanes = gpu.lanes()
        yield near


def places(gpu: FakeDevice, nbytes: int) -> dict[str, torch.Tensor]:
    return {"key": gpu.tensor(torch.zeros(nbytes, dtype=torch.uint8))}


@pytest.mark.parametrize("nbytes", SIZES)
async def test_a_value_of_this_process_lands_on_a_gpu(
    gpu: FakeDevice, store_near: StoreBuffer, nbytes: int
) -> None:
    into = places(gpu, nbytes)["key"]
    await store_near.put("key", noise(nbytes))
    assert await store_near.get("key", into=into) is into
    assert is_same(into, noise(nbytes))


@pytest.mark.parametrize("nbytes", SIZES)
async def test_a_value_of_a_peer_lands_on_a_gpu(
    gpu: FakeDevice, store_near: StoreBuffer, near: Peer, nbytes: int
) -> None:
    into = places(gpu, nbytes)["key"]
    await store_near.put("key", noise(nbytes))
    assert await near.store.get("key", into=into) is into
    assert is_same(into, noise(nbytes)) and not near.budget.used_bytes


@pytest.mark.parametrize("nbytes", SIZES)
async def test_a_tensor_of_a_peer_lands_on_a_gpu_and_the_others_do_not(
    gpu: FakeDevice, local: LookupBuffer, near: Peer, nbytes: int
) -> None:
    into = places(gpu, nbytes)
    await local.insert([1], None, noise(nbytes), noise(MIB, 2), noise(8, 3))
    entry = await near.lookup.drop_select([1], into=into)
    assert entry.key is into["key"] and is_same(only(entry.key), noise(nbytes))
    assert is_same(only(entry.value), noise(MIB, 2)) and is_same(
        entry.hidden, noise(8, 3)
    )
    assert isinstance(entry.value, torch.Tensor) and not entry.value.is_cuda
    await until(lambda: not local.statistics().used_bytes)


@pytest.fixture
async def near_pair(two_gpus: FakeGpus) -> AsyncIterator[NcclBuffers]:
    async with open_nccl_buffers(two_gpus) as near_pair:
        yield near_pair


async def test_an_insert_that_waits_for_room_goes_to_the_gpu_by_lanes(
    near_pair: NcclBuffers,
) -> None:
    await near_pair.buffer.insert([1], None, noise(12 * MIB), None, None)
    waiting = asyncio.create_task(
        near_pair.buffer.insert([2], None, noise(8 * MIB), None, None)
    )
    await until(lambda: near_pair.buffer.statistics().waiting_inserts == 1)
    entry = await near_pair.peer.lookup.drop_select([2])
    await waiting
    assert isinstance(entry.key, torch.Tensor) and entry.key.is_cuda
    assert is_same(entry.key, noise(8 * MIB)) and not near_pair.has_moved


async def test_what_is_wanted_in_host_memory_goes_there(near_pair: NcclBuffers) -> None:
    await fill(near_pair.buffer)
    into = {"key": torch.zeros(MIB, dtype=torch.uint8)}
    entry = await near_pair.peer.lookup.drop_select([1], into=into)
    assert entry.key is into["key"] and is_same(into["key"], noise(MIB))
    assert not near_pair.has_moved and near_pair.peer.transport == "nccl"


async def test_a_link_may_be_cut_while_a_place_is_waited_for(
    near_pair: NcclBuffers,
) -> None:
    await fill(near_pair.buffer)
    into = {"key": near_pair.theirs.tensor(torch.zeros(MIB, dtype=torch.uint8))}
    near_pair.theirs.tensors.stream(1).add(Delay(500))
    lookup = near_pair.peer.lookup
    select = asyncio.create_task(lookup.drop_select([1], into=into))
    await until(lambda: bool(near_pair.peer.budget.used_bytes))
    near_pair.peer._linked().abort()
    assert (await select).key is into["key"] and is_same(into["key"], noise(MIB))
    assert not near_pair.peer.budget.used_bytes


async def test_a_layer_that_was_handed_out_is_not_written_again_when_its_route_is_lost(
    near_pair: NcclBuffers,
) -> None:
    await near_pair.opened()
    layers = {name: TensorSpec((MIB,), "uint8") for name in ("key", "value")}
    async with (
        near_pair.buffer.open_insert([1], None, layers) as writer,
        near_pair.peer.lookup.open_drop_select([1]) as stream,
    ):
        await writer.put("key", noise(MIB, 1))
        key = await stream.wait_for("key")
        key.fill_(9)
        near_pair.ours.process.nccl.is_silent = True
        await writer.put("value", noise(MIB, 2))
        await until(lambda: near_pair.near_way.transport.receiver.is_busy)
        near_pair.near_way._stalled(PeerLost("nothing has come for long"))
        assert is_same(await stream.wait_for("value"), noise(MIB, 2))
        assert bool((key == 9).all()) and stream.attempt == 1


async def test_what_has_no_room_on_the_way_goes_from_host_memory(
    two_gpus: FakeGpus,
) -> None:
    async with open_nccl_buffers(two_gpus, max_bytes=MIB // 2) as pair:
        await pair.opened()
        await insert(pair)
        assert not pair.has_put
        await check_is_in(pair)


async def test_a_layer_in_host_memory_goes_by_lanes(nccl_pair: NcclBuffers) -> None:
    async with nccl_pair.peer.lookup.open_insert([1], None, LAYERS) as writer:
        await writer.put("key", noise(MIB, 1))
        await writer.put("hidden", noise(8))
    assert not nccl_pair.has_put
    await check_is_in(nccl_pair)


async def stuck(pair: NcclBuffers, putting: asyncio.Task[None]) -> None:
    """Wait until a put is under way, and does not go on."""
    await until(lambda: pair.way.transport.receiver.is_busy or putting.done())
    await until_blocked(putting)
    assert not putting.done()


@pytest.mark.parametrize("what", ["insert", "layer", "select"])
async def test_what_nobody_says_was_sent_before_the_way_broke_is_asked_for_again(
    nccl_pair: NcclBuffers, what: str
) -> None:
    way = nccl_pair.way if what == "select" else nccl_pair.near_way
    ended = list[object]()
    way.transport.sender.on_done = ended.append  # type: ignore[method-assign, assignment]
    if what == "insert":
        moving = asyncio.create_task(insert(nccl_pair))
    elif what == "layer":
        moving = asyncio.create_task(put_layers(nccl_pair))
    else:
        await nccl_pair.buffer.insert([1], None, noise(MIB, 1), None, noise(8))
        moving = asyncio.create_task(select(nccl_pair))
    await until(lambda: bool(ended))
    way._stalled(PeerLost("nothing has come for long"))
    async with asyncio.timeout(10):
        await moving
    assert nccl_pair.peer.transport == "inline"
    if what != "select":
        await check_is_in(nccl_pair)


async def select(pair: NcclBuffers) -> None:
    assert is_same(only((await pair.peer.lookup.drop_select([1])).key), noise(MIB, 1))


async def test_what_was_whole_when_the_way_broke_is_told_of_once(
    monkeypatch: pytest.MonkeyPatch, nccl_pair: NcclBuffers
) -> None:
    late, on_frame = list[Callable[[], None]](), ServedInsert.on_frame

    def hold_back(served: ServedInsert, frame: Frame, body: bytes) -> None:
        hear = partial(on_frame, served, frame, body)
        if isinstance(frame, Sent) and frame.route == "nccl" and frame.part == 1:
            late.append(hear)
        else:
            hear()

    monkeypatch.setattr(ServedInsert, "on_frame", hold_back)
    key, value = (nccl_pair.theirs.tensor(noise(MIB, salt)) for salt in (1, 2))
    insert = nccl_pair.peer.lookup.insert
    inserting = asyncio.create_task(insert([1], None, key, value, noise(8)))
    await until(lambda: bool(late))
    (entry,) = nccl_pair.buffer.ledger.table.entries.values()
    await until(lambda: 0 in entry.landed)
    nccl_pair.way._stalled(PeerLost("nothing has come for long"))
    await until(lambda: nccl_pair.peer.transport == "inline")
    late[0]()
    await inserting
    assert sorted(entry.landed) == [0, 1, 2]
    found = await nccl_pair.buffer.drop_select([1])
    assert is_same(only(found.key), noise(MIB, 1))
    assert is_same(only(found.value), noise(MIB, 2))


@contextlib.asynccontextmanager
async def given_up(two_gpus: FakeGpus, end: str) -> AsyncIterator[NcclBuffers]:
    """What a worker that is given up there may touch is let go after all.

    What is inserted later is to be made first: who allocates while an operation that
    the peer never begins is not aborted yet waits for it.
    """
    async with open_nccl_buffers(two_gpus) as pair:
        await pair.opened()
        pair.theirs.process.nccl.is_silent = True
        worker = getattr(pair, end).transport._worker
        yield pair
    for gpu in (pair.ours, pair.theirs):
        gpu.process.end()
    worker.kept.clear()  # as it would be for ever
    worker._flights.clear()
    while worker._gpu._operations:  # else who frees waits for them in vain
        worker._gpu.end_operation()


@pytest.mark.parametrize("end", ["way", "near_way"])
async def test_where_a_worker_that_is_given_up_may_write_nothing_is_put(
    two_gpus: FakeGpus, end: str
) -> None:
    async with given_up(two_gpus, end) as pair:
        again = pair.theirs.tensor(noise(MIB, 1))
        inserting = asyncio.create_task(insert(pair))
        await stuck(pair, inserting)
        getattr(pair, end).transport._worker.give_up(GPUFailed("it is stuck"))
        if end == "way":
            with pytest.raises(GPUFailed, match="it is stuck"):
                await inserting
            await pair.peer.lookup.insert([1], None, again, None, None)
        else:
            await inserting
        assert is_same(only((await pair.buffer.drop_select([1])).key), noise(MIB, 1))


async def test_a_layer_of_a_worker_that_is_given_up_fails_its_writer(
    two_gpus: FakeGpus,
) -> None:
    async with given_up(two_gpus, "way") as pair:
        key = pair.theirs.tensor(noise(MIB, 1))
        with pytest.raises(GPUFailed, match="it is stuck"):
            async with pair.peer.lookup.open_insert([1], None, LAYERS) as writer:
                putting = asyncio.create_task(writer.put("key", key))
                await stuck(pair, putting)
                pair.way.transport._worker.give_up(GPUFailed("it is stuck"))
                await putting
        await pair.peer.lookup.insert([1], None, key, None, None)
        assert is_same(only((await pair.buffer.drop_select([1])).key), noise(MIB, 1))


async def test_a_link_that_is_cut_is_connected_again_and_the_entry_sent(
    nccl_pair: NcclBuffers,
) -> None:
    nccl_pair.theirs.process.nccl.is_silent = True
    inserting = asyncio.create_task(insert(nccl_pair))
    await stuck(nccl_pair, inserting)
    nccl_pair.theirs.process.nccl.is_silent = False
    nccl_pair.peer._linked().abort()
    await inserting
    assert nccl_pair.peer.transport == "nccl"
    await check_is_in(nccl_pair)
