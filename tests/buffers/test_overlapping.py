"""What leaves a GPU and what arrives for one: copied while more is on the wire.

No clock says so, held copies do.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager

import pytest
import torch

from asynckv import (
    ChecksumError,
    GPUFailed,
    KVEntry,
    LookupBuffer,
    Peer,
    Server,
    StoreBuffer,
    TensorSpec,
    connect,
    serve,
)
from asynckv.buffers.remote.insert import RemoteSend
from asynckv.buffers.remote.store import begin_put
from asynckv.devices.copying import CopyPool
from asynckv.devices.cuda import Stream
from asynckv.links.link import Link
from asynckv.protocol.frames import Accepted, Frame, Put
from asynckv.protocol.transfer import ReceiveState, Verdict
from asynckv.protocol.transfer_frames import Grant, Sent
from asynckv.protocol.wire import digest_of
from asynckv.tensors.views import bytes_of
from asynckv.testing import (
    CancelMode,
    Outcome,
    sweep_cancellation,
    until,
    until_blocked,
)
from asynckv.testing.expectations import is_same, only
from asynckv.testing.lookup_checks.values import MIB, cancelled, noise
from asynckv.transfers.host_copies import HostCopies
from asynckv.transfers.source import source_of
from asynckv.transports.lane_sockets import LaneSocket
from harness.fake_devices import FakeDevice, fake_device
from harness.fake_gpus import FakeGpus
from harness.fake_gpus.gates import Gate
from harness.gpu_pairs import GpuPair, open_gpu_pair
from harness.held_copies import bytes_of_tensor, held_copies
from harness.link_pairs import dialled, landed_bytes, linked
from harness.raw_inserts import NoRoutes, RawInsert

pytestmark = pytest.mark.usefixtures("small_pieces")

PIECE = MIB // 4


FarLink = Callable[[Server, Peer], Link]

LAYERS = {name: TensorSpec((MIB,), "uint8") for name in ("key", "value")}


@pytest.fixture
def gpu() -> Iterator[FakeDevice]:
    with fake_device(max_delay=2) as gpu:
        yield gpu


@asynccontextmanager
async def producing(
    gpu: FakeDevice, *, lanes: int | None = None
) -> AsyncIterator[tuple[LookupBuffer, StoreBuffer, Server, Peer]]:
    """A peer whose tensors are on a GPU, and buffers in host memory."""
    async with (
        LookupBuffer("16MiB", drain_s=0) as lookup,
        StoreBuffer("8MiB") as store,
        serve("tcp://127.0.0.1:0", lookup=lookup, store=store, lanes=lanes) as server,
        connect(server.url, lanes=lanes) as peer,
    ):
        peer.pool.lanes = gpu.lanes()
        yield lookup, store, server, peer


class Watched(HostCopies):
    """Knows the most that there ever was."""

    most = 0

    async def empty(self, nbytes: int) -> memoryview:
        memory = await super().empty(nbytes)
        self.most = max(self.most, self.used_bytes)
        return memory


@pytest.fixture
def key(gpu: FakeDevice) -> torch.Tensor:
    return gpu.tensor(noise(MIB))


async def test_one_tensor_is_on_the_wire_while_the_next_is_copied(
    gpu: FakeDevice,
) -> None:
    key, value = gpu.tensor(noise(MIB, 1)), gpu.tensor(noise(MIB, 2))
    async with producing(gpu) as (lookup, _, _, peer):
        with held_copies(gpu.process, bytes_of_tensor(gpu, value)) as gate:
            insert = peer.lookup.insert([1], None, key, value, None)
            task = asyncio.create_task(insert)
            entries = lookup.ledger.table.entries
            await until(lambda: any(entry.landed == [0] for entry in entries.values()))
            assert not task.done()
            gate.open()
            await task
        entry = await lookup.drop_select([1])
        assert is_same(only(entry.key), noise(MIB, 1))
        assert is_same(only(entry.value), noise(MIB, 2))


@pytest.mark.parametrize("call", ["insert", "layer", "value"])
async def test_one_piece_is_on_the_wire_while_the_next_is_copied(
    gpu: FakeDevice, far_link: FarLink, call: str
) -> None:
    source = gpu.tensor(noise(MIB))
    async with producing(gpu) as (lookup, store, server, peer):
        with held_copies(gpu.process, bytes_of_tensor(gpu, source, PIECE)) as gate:
            task = asyncio.create_task(send(peer, call, source))
            await until(lambda: landed_bytes(far_link(server, peer)) == PIECE)
            await until_blocked(task)
            assert not task.done()
            gate.open()
            await task
        if call == "value":
            found = await store.get("key")
        else:
            found = only((await lookup.drop_select([1])).key)
        assert found is not None and is_same(found, noise(MIB))


async def send(peer: Peer, call: str, source: torch.Tensor) -> None:
    if call == "value":
        await peer.store.put("key", source)
    elif call == "insert":
        await peer.lookup.insert([1], None, source, None, None)
    else:
        specs = {"key": LAYERS["key"]}
        async with peer.lookup.open_insert([1], None, specs) as writer:
            await writer.put("key", source)


@pytest.mark.parametrize("lanes", [1, 2])
async def test_what_leaves_a_gpu_takes_a_bounded_part_of_the_host(
    gpu: FakeDevice, lanes: int
) -> None:
    layers = {str(n): gpu.tensor(noise(MIB + n, n)) for n in range(4)}
    async with producing(gpu, lanes=lanes) as (lookup, _, _, peer):
        peer.routes.copies = copies = Watched(2 * PIECE)
        await peer.lookup.insert([1], None, layers, None, gpu.tensor(noise(8)))
        entry = await lookup.drop_select([1])
        assert isinstance(entry.key, dict)
        for number, name in enumerate(layers):
            assert is_same(entry.key[name], noise(MIB + number, number))
        assert copies.most <= 2 * PIECE
        await until(lambda: not copies.used_bytes)


async def test_what_waits_for_room_takes_no_memory_of_the_host(
    key: torch.Tensor,
    gpu: FakeDevice,
) -> None:
    async with producing(gpu) as (lookup, _, _, peer):
        peer.routes.copies = copies = Watched()
        await lookup.insert([2], None, noise(15 * MIB + 1, 2), None, None)
        task = asyncio.create_task(peer.lookup.insert([1], None, key, None, None))
        await until(lambda: lookup.statistics().waiting_inserts == 1)
        assert not task.done() and not copies.most
        await lookup.drop_select([2])
        await task
        assert is_same(only((await lookup.drop_select([1])).key), noise(MIB))


async def test_what_was_given_back_on_its_way_is_read_again(
    key: torch.Tensor, gpu: FakeDevice
) -> None:
    async with producing(gpu) as (lookup, _, _, peer):
        await lookup.insert([2], None, noise(15 * MIB + 1, 2), None, None)
        task = asyncio.create_task(peer.lookup.insert([1], None, key, None, None))
        with contextlib.suppress(KeyboardInterrupt):
            async with lookup.drop_select([1]) as entry:
                assert is_same(only(entry.key), noise(MIB))
                del entry
                raise KeyboardInterrupt
        assert not task.done()
        assert is_same(only((await lookup.drop_select([1])).key), noise(MIB))
        await task


async def test_other_bytes_than_were_digested_are_refused(
    key: torch.Tensor, gpu: FakeDevice
) -> None:
    async with producing(gpu) as (lookup, _, _, peer):
        with held_copies(gpu.process, bytes_of_tensor(gpu, key, PIECE)) as gate:
            insert = peer.lookup.insert([1], None, key, None, None, entry_id="it")
            gate.open()
            await insert
            assert (await lookup.drop_select([1])).entry_id == "it"
        digest = peer.pool.digest

        async def digested_before(tensors: list[object]) -> list[bytes]:
            found = await digest(tensors)  # type: ignore[arg-type]
            key.fill_(9)
            return found

        peer.pool.digest = digested_before  # type: ignore[assignment, method-assign]
        with pytest.raises(ChecksumError):
            await peer.lookup.insert([1], None, key, None, None, entry_id="it2")
        assert not lookup.statistics().entries


async def test_a_gpu_that_fails_between_two_pieces_withdraws_the_insert(
    key: torch.Tensor,
    gpu: FakeDevice,
) -> None:
    async with producing(gpu) as (lookup, _, server, peer):
        with held_copies(gpu.process, bytes_of_tensor(gpu, key, PIECE)) as gate:
            task = asyncio.create_task(peer.lookup.insert([1], None, key, None, None))
            (link,) = [service.link for service in server._services]
            await until(lambda: landed_bytes(link) == PIECE)
            gate.fail(GPUFailed("it has fallen off the bus"))
            with pytest.raises(GPUFailed, match="off the bus") as kept:
                await task
        await until(lambda: not lookup.statistics().used_bytes)
        await until(lambda: not peer.routes.copies.used_bytes)
        assert link.is_open and kept.value.__traceback__ is not None


async def test_what_is_accepted_early_is_fed_no_further(
    key: torch.Tensor, gpu: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    sendings, on_frame = list[RemoteSend](), RemoteSend.on_frame

    def note(sending: RemoteSend, frame: Frame, body: bytes) -> None:
        sendings.append(sending)
        on_frame(sending, frame, body)

    monkeypatch.setattr(RemoteSend, "on_frame", note)
    async with producing(gpu) as (_, _, server, peer):
        link = peer.link_nowait()
        assert link is not None
        with held_copies(gpu.process, bytes_of_tensor(gpu, key, PIECE)) as gate:
            task = asyncio.create_task(peer.lookup.insert([1], None, key, None, None))
            (far,) = [service.link for service in server._services]
            await until(lambda: landed_bytes(far) == PIECE)
            sendings[0].on_frame(Accepted(), b"")
            gate.open()
            await task
        assert not link.payload._leaving  # type: ignore[attr-defined]
        await until(lambda: not peer.routes.copies.used_bytes)


async def test_what_is_granted_again_while_it_is_fed_is_refused(
    key: torch.Tensor,
    gpu: FakeDevice,
) -> None:
    async with linked(answer=lambda *_: None) as pair:
        pool = CopyPool(lanes=gpu.lanes())
        source = await source_of(pool.catch(key), pool, None, MIB)
        sending = begin_put(pair.near, "key", source, NoRoutes(pool))
        await until(lambda: bool(pair.service.asked))
        stream, frame, _ = pair.service.asked[0]
        assert isinstance(frame, Put)
        with held_copies(gpu.process, bytes_of_tensor(gpu, key, PIECE)) as gate:
            number, payload = frame.transfer, pair.far.payload
            payload.receive(number, 0, memoryview(bytearray(MIB)), lambda *_: None)
            stream.send(Grant(number))
            await until(lambda: payload.landed_bytes(number) == PIECE)
            stream.send(Grant(number))
            await until(lambda: not pair.near.is_open)
            gate.open()
            leaving = pair.near.payload._leaving  # type: ignore[attr-defined]
            await until(lambda: not leaving)
        await sending.quiesce()
        pool.close()


def tasks_of(sending: RemoteSend) -> int:
    outgoing = sending._outgoing
    return 1 if outgoing is None or outgoing._tasks is None else len(outgoing._tasks)


async def test_what_was_fed_whole_is_not_sent_once_the_peer_needs_it_no_more(
    gpu: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with linked(answer=lambda *_: None) as pair:
        pool = CopyPool(lanes=gpu.lanes())
        routes, payload = NoRoutes(pool), pair.near.payload
        key = pool.catch(gpu.tensor(noise(MIB)))
        source = await source_of(key, pool, None, MIB)
        with monkeypatch.context() as patch:
            # Queued, and no thread takes it.
            patch.setattr(LaneSocket, "start", lambda *_: False)
            sending = begin_put(pair.near, "key", source, routes)
            await until(lambda: bool(pair.service.asked))
            stream, frame, _ = pair.service.asked[0]
            assert isinstance(frame, Put)
            stream.send(Grant(frame.transfer))
            await until(lambda: routes.copies.used_bytes == MIB)
            await until(lambda: not tasks_of(sending))
        leaving = payload._leaving  # type: ignore[attr-defined]
        assert leaving
        sending.on_frame(Accepted(), b"")
        assert not leaving
        await until(lambda: not routes.copies.used_bytes)
        assert await sending.accepted()
        pool.close()


@asynccontextmanager
async def kept_on_a_gpu(
    gpus: FakeGpus, call: str
) -> AsyncIterator[tuple[GpuPair, Callable[[], Awaitable[object]]]]:
    """An entry on the buffer's GPU, and who wants it by lanes."""
    async with open_gpu_pair(gpus, device=None, url="?payload=inline") as pair:
        await pair.buffer.insert([1], None, noise(MIB), None, None)
        yield pair, lambda: TAKES[call](pair.peer)


async def entry_of(peer: Peer) -> object:
    return only((await peer.lookup.drop_select([1])).key)


async def layer_of(peer: Peer) -> object:
    async with peer.lookup.open_drop_select([1]) as stream:
        return await stream.wait_for("key")


TAKES = {"entry": entry_of, "layer": layer_of}


@contextlib.contextmanager
def held_after_one(kept: GpuPair, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """Hold what a buffer's GPU copies for peers, but for the first piece."""
    gate, cuda, copies = Gate(), kept.ours.process.cuda, list[int]()
    copy = cuda.copy

    def hold(target: int, source: int, nbytes: int, stream: Stream) -> None:
        if nbytes > 64:
            copies.append(nbytes)
        if len(copies) > 1:
            with cuda._gpus.lock:
                stream.add(gate)  # type: ignore[attr-defined]
        copy(target, source, nbytes, stream)

    with monkeypatch.context() as patch:
        patch.setattr(cuda, "copy", hold)
        try:
            yield gate
        finally:
            gate.open()


@pytest.mark.parametrize("call", ["entry", "layer"])
@pytest.mark.parametrize("end", ["read", "cancelled"])
async def test_what_is_kept_on_a_gpu_leaves_in_pieces(
    gpus: FakeGpus, monkeypatch: pytest.MonkeyPatch, call: str, end: str
) -> None:
    async with kept_on_a_gpu(gpus, call) as (kept, ask):
        link = kept.peer.link_nowait()
        assert link is not None
        with held_after_one(kept, monkeypatch):
            task = asyncio.ensure_future(ask())
            await until(lambda: landed_bytes(link) == PIECE)
            assert not task.done()
            if end == "cancelled":
                await cancelled(task)
        found = await (task if end == "read" else ask())
        assert is_same(only(found), noise(MIB))
        devices = kept.devices
        await until(lambda: not devices.copies.used_bytes)
        assert link.is_open


@pytest.mark.parametrize("call", ["entry", "layer"])
async def test_what_a_gpu_fails_to_send_the_rest_of_is_not_lost(
    gpus: FakeGpus,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    call: str,
) -> None:
    async with kept_on_a_gpu(gpus, call) as (kept, ask):
        link, devices = kept.peer.link_nowait(), kept.devices
        assert link is not None
        with held_after_one(kept, monkeypatch) as gate:
            task = asyncio.ensure_future(ask())
            await until(lambda: landed_bytes(link) == PIECE)
            gate.fail(GPUFailed("it has fallen off the bus"))
            with pytest.raises(GPUFailed, match="off the bus") as kept_error:
                await task
        await until(lambda: not devices.copies.used_bytes)
        await until(lambda: not kept.peer.budget.used_bytes)
        assert kept_error.value.__traceback__ is not None and caplog.records
        assert is_same(only(await ask()), noise(MIB)) and link.is_open
    caplog.clear()


@asynccontextmanager
async def consuming(gpu: FakeDevice) -> AsyncIterator[tuple[LookupBuffer, Peer]]:
    """A buffer in host memory, and a peer that wants things on a GPU."""
    async with (
        LookupBuffer("8MiB", drain_s=0) as lookup,
        serve("tcp://127.0.0.1:0", lookup=lookup) as server,
        connect(server.url + "?payload=inline", max_bytes="8MiB") as peer,
    ):
        peer.pool.lanes = gpu.lanes()
        yield lookup, peer


def places(gpu: FakeDevice) -> dict[str, torch.Tensor]:
    return {name: gpu.tensor(noise(MIB) * 0) for name in LAYERS}


async def test_what_has_landed_is_on_the_gpu_while_others_are_on_the_wire(
    gpu: FakeDevice,
) -> None:
    into = places(gpu)
    async with consuming(gpu) as (lookup, peer):
        task = asyncio.ensure_future(peer.lookup.drop_select([1], into=into))
        async with lookup.open_insert([1], None, LAYERS) as writer:
            await writer.put("key", noise(MIB, 1))
            await until(lambda: is_same(into["key"], noise(MIB, 1)))
            assert not task.done()
            await writer.put("value", noise(MIB, 2))
        entry = await task
        assert entry.key is into["key"] and entry.value is into["value"]
        assert is_same(into["value"], noise(MIB, 2)) and not peer.budget.used_bytes


async def test_what_is_aborted_after_some_was_lifted_is_overwritten(
    gpu: FakeDevice,
) -> None:
    into = places(gpu)
    async with consuming(gpu) as (lookup, peer):
        task = asyncio.ensure_future(peer.lookup.drop_select([1], into=into))
        with contextlib.suppress(ZeroDivisionError):
            async with lookup.open_insert([1], None, LAYERS) as writer:
                await writer.put("key", noise(MIB, 1))
                await until(lambda: is_same(into["key"], noise(MIB, 1)))
                raise ZeroDivisionError
        await lookup.insert([1], None, noise(MIB, 3), noise(MIB, 4), None)
        await task
        assert is_same(into["key"], noise(MIB, 3))
        assert is_same(into["value"], noise(MIB, 4))


async def test_a_gpu_that_fails_before_all_has_come_gives_the_entry_back(
    gpu: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*anything: object) -> None:
        raise GPUFailed("it has fallen off the bus")

    async with consuming(gpu) as (lookup, peer):
        into = places(gpu)
        task = asyncio.ensure_future(peer.lookup.drop_select([1], into=into))
        async with lookup.open_insert([1], None, LAYERS) as writer:
            with monkeypatch.context() as patch:
                patch.setattr(gpu.process.cuda, "copy", fail)
                await writer.put("key", noise(MIB, 1))
                with pytest.raises(GPUFailed, match="off the bus"):
                    await task
            await writer.put("value", noise(MIB, 2))
        entry = await peer.lookup.drop_select([1])
        assert is_same(only(entry.key), noise(MIB, 1))
        assert entry.attempt == 2


async def test_a_cancelled_select_of_several_leaves_the_gpu_alone(
    gpu: FakeDevice,
) -> None:
    into = places(gpu)
    async with consuming(gpu) as (lookup, peer):

        async def use() -> KVEntry:
            inserting = lookup.open_insert([1], None, LAYERS)
            selecting = asyncio.ensure_future(peer.lookup.drop_select([1], into=into))
            try:
                async with inserting as writer:
                    await writer.put("key", noise(MIB, 1))
                    await until(lambda: is_same(into["key"], noise(MIB, 1)))
                    await writer.put("value", noise(MIB, 2))
                return await selecting
            finally:
                selecting.cancel()
                await asyncio.wait({selecting})

        async def check(k: int, mode: CancelMode, outcome: Outcome[KVEntry]) -> None:
            assert not [x for x in gpu.process.space.allocations() if x.users]
            for tensor in into.values():
                tensor.fill_(9)
            await peer.lookup.peek([1])
            if lookup.statistics().entries:
                await peer.lookup.drop_select([1])
            assert all(bool((tensor == 9).all()) for tensor in into.values())
            await until(lambda: not peer.budget.used_bytes)

        await sweep_cancellation(use, check, modes=("task",))


@asynccontextmanager
async def putting(gpu: FakeDevice) -> AsyncIterator[tuple[LookupBuffer, Link]]:
    """A buffer on a GPU, and a producer that says what it likes."""
    async with (
        LookupBuffer("8MiB", device=gpu.device, drain_s=0) as lookup,
        serve("tcp://127.0.0.1:0", lookup=lookup) as server,
        dialled(server.url, "producer") as link,
    ):
        yield lookup, link


def put(link: Link, raw: RawInsert, part: int, digest: bytes | None = None) -> None:
    source = bytes_of(noise(MIB, part))
    link.payload.send(raw.transfer, part, source, lambda *_: None)
    raw.stream.send(Sent(raw.transfer, part, digest or digest_of(source)))


async def test_what_was_put_is_on_the_gpu_while_others_are_on_the_wire(
    gpu: FakeDevice,
) -> None:
    async with putting(gpu) as (lookup, link):
        raw = RawInsert(link, MIB, MIB, MIB)
        await raw.granted()
        (entry,) = lookup.ledger.table.entries.values()
        for part in (1, 0):
            put(link, raw, part)
            await until(lambda: part in entry.landed)  # noqa: B023
        assert entry.landed == [1, 0]
        put(link, raw, 2)
        assert await raw.last() == Accepted()
        found = (await lookup.drop_select()).key
        assert isinstance(found, dict)
        for part in range(3):
            assert is_same(found[str(part)], noise(MIB, part))


async def test_what_was_put_is_copied_while_more_of_it_lands(
    gpu: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    come, compare = list[int](), ReceiveState.compare

    def note(state: ReceiveState, part: int, landed: bytes, sent: bytes) -> Verdict:
        come.append(part)
        return compare(state, part, landed, sent)

    monkeypatch.setattr(ReceiveState, "compare", note)
    async with putting(gpu) as (lookup, link):
        raw = RawInsert(link, MIB, MIB)
        await raw.granted()
        (entry,) = lookup.ledger.table.entries.values()
        with held_copies(gpu.process) as gate:
            put(link, raw, 0)
            await until(lambda: come == [0])
            put(link, raw, 1)
            await until(lambda: come == [0, 1])
            assert not entry.landed
            gate.open()
            assert await raw.last() == Accepted()
        assert entry.landed == [0, 1]


async def test_wrong_bytes_end_an_insert_of_which_some_is_on_the_gpu(
    gpu: FakeDevice,
) -> None:
    async with putting(gpu) as (lookup, link):
        raw = RawInsert(link, MIB, MIB)
        await raw.granted()
        (entry,) = lookup.ledger.table.entries.values()
        put(link, raw, 0)
        await until(lambda: entry.landed == [0])
        put(link, raw, 1, b"x" * 16)
        assert (await raw.failure()).code == "ChecksumError"
        await until(lambda: not lookup.statistics().used_bytes)
