"""What leaves a GPU: copied while more of it is on the wire.

No clock says so, held copies do.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager

import pytest

from asynckv.buffers.remote.insert import Sending
from asynckv.buffers.remote.peer import Peer
from asynckv.buffers.remote.store import begin_put
from asynckv.devices.copying import CopyPool
from asynckv.devices.cuda import Stream
from asynckv.errors import GPUFailed
from asynckv.protocol.frames import Accepted, Put
from asynckv.protocol.transfer_frames import Grant
from asynckv.testing.blocked import until
from asynckv.testing.expectations import is_same, only
from asynckv.testing.lookup_checks.values import MIB, noise
from asynckv.transfers.source import source_of
from asynckv.transports.lane_sockets import LaneSocket
from harness.fake_devices import FakeDevice, fake_device
from harness.fake_gpus import FakeGpus
from harness.fake_gpus.gates import Gate
from harness.gpu_pairs import GpuPair, open_gpu_pair
from harness.held_copies import bytes_of_tensor, held_copies
from harness.link_pairs import landed_bytes, linked
from harness.no_routes import NoRoutes

pytestmark = pytest.mark.usefixtures("small_pieces")

PIECE = MIB // 4


@pytest.fixture
def gpu() -> Iterator[FakeDevice]:
    with fake_device(max_delay=2) as gpu:
        yield gpu


async def test_what_is_granted_again_while_it_is_fed_is_refused(
    gpu: FakeDevice,
) -> None:
    key = gpu.tensor(noise(MIB))
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


def tasks_of(sending: Sending) -> int:
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
                task.cancel()
                await asyncio.wait({task})
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
