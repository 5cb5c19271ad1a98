"""Layers that a peer pushes from its GPU, and says what it likes of."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from asynckv import GPUFailed, LeaseLost, LookupBuffer, PeerLost, serve
from asynckv.buffers.serving import service
from asynckv.buffers.serving.service import Silence
from asynckv.devices.copying import CopyPool
from asynckv.devices.cuda import DeviceMemory
from asynckv.links.dial import dial
from asynckv.protocol.frames import Accepted, Commit, Push, Retract
from asynckv.protocol.transfer_frames import Grant, Sent
from asynckv.protocol.wire import digest_of
from asynckv.tensors.views import bytes_of
from asynckv.testing import until
from asynckv.testing.expectations import is_same
from asynckv.testing.lookup_checks.values import MIB, noise
from asynckv.transfers.offers import ready_memory
from harness.fake_gpus import FakeGpus
from harness.link_pairs import name_of
from harness.nccl_buffer_pairs import NcclBuffers, open_nccl_buffers
from harness.raw_inserts import RawInsert

BYTES = bytes_of(noise(MIB, 1))
DIGEST = digest_of(BYTES)


class RawWriter:
    """A writer on a GPU that says what it likes."""

    def __init__(self, pair: NcclBuffers, *sizes: int) -> None:
        self.pair = pair
        self.link = pair.peer._linked()
        self.raw = RawInsert(self.link, *sizes, streaming=True)
        self.key = pair.theirs.tensor(noise(MIB, 1))

    @property
    def place(self) -> DeviceMemory:
        pool = self.pair.peer.pool
        assert isinstance(pool, CopyPool)
        return pool.memory_of(self.key)

    def say(self, frame: Push | Sent | Retract | Commit) -> None:
        self.raw.stream.send(frame)

    async def push(self) -> int:
        """Announce the first tensor, and wait until memory of the GPU is granted."""
        transfer = self.link.new_transfer()
        self.say(Push(transfer, 0, inline=False, on_gpu=True))
        while await self.raw.hearer.next() != (Grant(transfer, "nccl", "full"), b""):
            pass
        return transfer

    async def send(self, transfer: int) -> None:
        """Send it from GPU to GPU, and wait until the peer has verified it."""
        way, place = self.pair.near_way, await ready_memory(self.place)
        way.transport.send(transfer, 0, place, lambda *_: None)
        self.say(Sent(transfer, 0, DIGEST, "full", "nccl"))
        while await self.raw.hearer.next() != (Sent(transfer, 0, route="nccl"), b""):
            pass

    async def is_refused(self) -> str:
        """Wait for the end of the link; return why."""
        await until(lambda: not self.link.is_open)
        return str(self.link.error)


@pytest.fixture
async def writer(two_gpus: FakeGpus) -> AsyncIterator[RawWriter]:
    async with open_nccl_buffers(two_gpus, reconnect_s=0) as pair:
        await pair.opened()
        writer = RawWriter(pair, MIB, 8)
        await writer.raw.granted()
        yield writer


async def test_a_layer_is_shown_when_its_writer_knows_that_it_came(
    writer: RawWriter,
) -> None:
    transfer = await writer.push()
    await writer.send(transfer)
    (entry,) = writer.pair.buffer.ledger.table.entries.values()
    assert not entry.landed
    writer.say(Sent(transfer, 0, route="nccl"))
    writer.raw.push_inline(bytes(8), 1)
    writer.say(Commit())
    assert await writer.raw.last() == Accepted()
    found = await writer.pair.buffer.drop_select()
    assert is_same(found.key["0"], noise(MIB, 1))  # type: ignore[index]


async def test_a_layer_that_came_may_be_taken_back(writer: RawWriter) -> None:
    first = await writer.push()
    await writer.send(first)
    writer.say(Retract(first))
    writer.say(Sent(first, 0, b"", "full", "nccl"))  # late, and of no interest
    second = await writer.push()
    await writer.send(second)
    writer.say(Sent(second, 0, route="nccl"))
    (entry,) = writer.pair.buffer.ledger.table.entries.values()
    await until(lambda: entry.landed == [0])


async def test_what_is_not_here_is_not_done(writer: RawWriter) -> None:
    writer.say(Sent(await writer.push(), 0))
    assert "makes no sense" in await writer.is_refused()


async def test_what_is_done_again_does_not_matter(writer: RawWriter) -> None:
    transfer = await writer.push()
    await writer.send(transfer)
    writer.say(Sent(transfer, 0, route="nccl"))
    writer.say(Sent(transfer, 0, route="nccl"))
    assert await writer.pair.peer.lookup.peek([1]) == 0  # it was heard
    assert writer.link.is_open


async def test_of_what_was_not_asked_for_nothing_is_sent_by_gpu(
    local: LookupBuffer,
) -> None:
    async with serve("mem://", lookup=local) as server:
        link = await dial(server.url, identity=name_of("producer"))
        raw = RawInsert(link, MIB, streaming=True)
        await raw.granted()
        raw.stream.send(Sent(await raw.push(), 0, b"", "off", "nccl"))
        await until(lambda: not link.is_open)
        assert "not asked for" in str(link.error)
        await link.aclose()


async def test_a_layer_that_its_way_has_lost_is_asked_for_again(
    writer: RawWriter,
) -> None:
    transfer = await writer.push()
    writer.pair.way._stalled(PeerLost("nothing has come for long"))
    await writer.raw.granted(transfer)
    writer.say(Sent(transfer, 0, DIGEST, "full", "nccl"))  # said before it was lost
    writer.link.payload.send(transfer, 0, BYTES, lambda *_: None)
    writer.say(Sent(transfer, 0, DIGEST))
    (entry,) = writer.pair.buffer.ledger.table.entries.values()
    await until(lambda: entry.landed == [0])


async def test_what_was_taken_back_when_its_way_was_lost_is_not_asked_for(
    writer: RawWriter,
) -> None:
    transfer = await writer.push()
    writer.say(Retract(transfer))
    assert await writer.pair.peer.lookup.peek([1]) == 0  # it was heard
    writer.pair.way._stalled(PeerLost("nothing has come for long"))
    again = writer.link.new_transfer()
    writer.say(Push(again, 0, inline=False))
    await writer.raw.granted(again)
    assert (Grant(transfer), b"") not in writer.raw.hearer.frames


async def test_what_is_taken_back_while_its_way_is_lost_is_not_asked_for(
    writer: RawWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    transfer = await writer.push()
    lost = asyncio.Event()
    quiesce = type(writer.pair.way.transport).quiesce

    async def wait(transport: object, number: int) -> None:
        lost.set()
        await release.wait()
        await quiesce(writer.pair.way.transport, number)

    release = asyncio.Event()
    monkeypatch.setattr(type(writer.pair.way.transport), "quiesce", wait)
    writer.pair.way._stalled(PeerLost("nothing has come for long"))
    await lost.wait()
    writer.say(Retract(transfer))
    again = writer.link.new_transfer()
    writer.say(Push(again, 0, inline=False))
    assert await writer.pair.peer.lookup.peek([1]) == 0  # all of it was heard
    release.set()
    await writer.raw.granted(again)
    assert (Grant(transfer), b"") not in writer.raw.hearer.frames


async def test_where_a_worker_may_write_for_ever_nothing_is_put_again(
    writer: RawWriter,
) -> None:
    transfer = await writer.push()
    writer.say(Retract(transfer))
    assert await writer.pair.peer.lookup.peek([1]) == 0
    writer.pair.way.transport._worker.give_up(GPUFailed("it is stuck"))
    writer.say(Push(writer.link.new_transfer(), 0, inline=False))
    assert (await writer.raw.failure()).code == "GPUFailed"


async def test_what_nobody_needs_when_its_way_is_lost_comes_and_is_dropped(
    writer: RawWriter,
) -> None:
    transfer = await writer.push()
    pair = writer.pair
    (entry,) = pair.buffer.ledger.table.entries.values()
    with pytest.raises(LeaseLost):
        async with pair.buffer.open_drop_select():
            pair.way._stalled(PeerLost("nothing has come for long"))
            (lease,) = entry.leases.values()
            pair.buffer.ledger.leases.acknowledge(lease)
    await writer.raw.granted(transfer)
    writer.link.payload.send(transfer, 0, BYTES, lambda *_: None)
    writer.say(Sent(transfer, 0, DIGEST))
    writer.say(Commit())
    writer.raw.push_inline(bytes(8), 1)
    assert await writer.raw.last() == Accepted()


async def test_a_way_that_is_lost_when_the_writer_has_left_is_no_matter(
    writer: RawWriter,
) -> None:
    await writer.push()
    writer.pair.way._stalled(PeerLost("nothing has come for long"))
    writer.link.abort()
    await until(lambda: not writer.pair.buffer.statistics().used_bytes)


async def test_a_writer_that_sends_nothing_by_its_gpu_has_fallen_silent(
    writer: RawWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "SILENCE_S", 0.05)
    await writer.push()
    assert "no tensor came" in (await writer.raw.failure()).message
    await until(lambda: not writer.pair.buffer.statistics().used_bytes)


async def test_a_writer_whose_part_is_worked_at_here_is_not_silent_meanwhile(
    writer: RawWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks, fall_silent = list[Silence](), Silence._fall_silent

    def look(listener: Silence) -> None:
        looks.append(listener)
        fall_silent(listener)

    monkeypatch.setattr(Silence, "_fall_silent", look)
    with writer.pair.way.progress.working(transfer := await writer.push()):
        monkeypatch.setattr(service, "SILENCE_S", 0.02)
        writer.say(Retract(transfer + 2))  # heard: from now on it is short
        await until(lambda: len(looks) > 2)
        assert len(writer.raw.hearer.frames) == 2  # grants, and no failure
    assert "no tensor came" in (await writer.raw.failure()).message
