"""Memory and layers of GPUs, shown to and pushed by peers that say what they like."""

from __future__ import annotations

import asyncio
import contextlib
import errno
from collections.abc import AsyncIterator

import msgspec
import pytest
import torch

from asynckv import GPUFailed, LeaseLost, LookupBuffer, PeerLost, serve
from asynckv.buffers.entries.entries import StoredEntry
from asynckv.buffers.serving import service
from asynckv.buffers.serving.select import export_entry
from asynckv.buffers.serving.service import Silence
from asynckv.devices.copying import CopyPool
from asynckv.devices.cuda import DeviceMemory
from asynckv.devices.names import Device
from asynckv.links.fd_socket import has_fd_sockets
from asynckv.links.link import Link, LinkStream
from asynckv.protocol.frames import (
    Accepted,
    Ack,
    Cancel,
    Commit,
    Frame,
    Offer,
    Push,
    Retract,
    Select,
)
from asynckv.protocol.transfer_frames import (
    Eager,
    Exposed,
    Grant,
    OpenMemory,
    Proved,
    Sent,
)
from asynckv.protocol.values import MappedOffer, Place
from asynckv.protocol.wire import digest_of
from asynckv.sharing import exporter
from asynckv.sharing.exporter import Importer, Pin
from asynckv.tensors.views import bytes_of
from asynckv.testing import until
from asynckv.testing.expectations import is_same
from asynckv.testing.lookup_checks.values import MIB, noise
from asynckv.transfers.host_copies import D2HCopier
from asynckv.transfers.manifest import unpack_mapped
from asynckv.transfers.offers import ready_memory
from asynckv.transfers.source import Source
from harness.fake_devices import FakeDevice
from harness.fake_gpus import FakeGpus
from harness.gpu_pairs import GpuPair, NcclBuffers, open_gpu_pair, open_nccl_buffers
from harness.link_pairs import Hearer, dialled
from harness.raw_inserts import RawInsert

pytestmark = pytest.mark.skipif(not has_fd_sockets(), reason="no sockets for handles")


def importer_of(pair: GpuPair) -> Importer:
    (importer,) = pair.buffer.exporter._importers
    return importer


def show_parts(
    entry: StoredEntry, importer: Importer | None, max_nbytes: int = MIB
) -> tuple[Pin, MappedOffer, bytes] | None:
    return export_entry(entry, importer, max_nbytes, streams=True)


async def inserted(pair: GpuPair, key: torch.Tensor, hidden: int = 8) -> StoredEntry:
    await pair.buffer.insert([1], None, key, None, noise(hidden))
    (entry,) = pair.buffer.ledger.table.entries.values()
    return entry


async def offered(pair: GpuPair) -> tuple[Hearer, LinkStream, Offer, bytes]:
    """Ask for a stream by hand, and return what is offered."""
    hearer = Hearer()
    link = pair.peer._linked()
    stream = link.open_stream(hearer, Select(has_key=False, stream=True))
    offer, body = await hearer.next_of(Offer)
    return hearer, stream, offer, body


async def test_an_offer_says_where_what_does_not_ride_will_lie(pair: GpuPair) -> None:
    entry = await inserted(pair, pair.ours.tensor(noise(MIB)))
    found = show_parts(entry, importer_of(pair))
    assert found is not None
    pin, mapped, encoded = found
    places = msgspec.msgpack.decode(encoded, type=tuple[Place | None, ...])
    assert [place is None for place in places] == [False, True]
    assert (mapped.pin, mapped.nbytes, mapped.edges) == (pin.number, len(encoded), b"")
    assert importer_of(pair).pinned_regions == 1
    importer_of(pair).unpin(pin.number)


async def test_who_has_nothing_open_is_shown_nothing(pair: GpuPair) -> None:
    entry = await inserted(pair, noise(MIB))
    assert show_parts(entry, None) is None
    entry.in_arena = False
    assert show_parts(entry, importer_of(pair)) is None
    entry.in_arena = True


async def test_what_only_rides_is_not_shown(pair: GpuPair) -> None:
    assert show_parts(await inserted(pair, noise(8)), importer_of(pair)) is None


async def test_beside_what_is_long_and_in_host_memory_nothing_is_shown(
    pair: GpuPair,
) -> None:
    key = pair.buffer.empty((MIB,), torch.uint8)
    entry = await inserted(pair, key, 32 * 1024)
    assert [r.is_on_device for r in entry.regions[:2]] == [True, False]
    assert show_parts(entry, importer_of(pair)) is None
    del key


async def test_what_fits_in_no_frame_with_its_places_goes_by_lanes(
    pair: GpuPair,
) -> None:
    entry = await inserted(pair, noise(MIB))
    preamble = len(entry.preamble())
    shown = show_parts(entry, importer_of(pair))
    assert shown is not None
    importer_of(pair).unpin(shown[0].number)
    too_few = len(shown[2]) - 1
    assert show_parts(entry, importer_of(pair), too_few) is None
    assert not pair.buffer.statistics().mapped_by
    (services,) = pair.server._services
    link = services.link
    link.limits = msgspec.structs.replace(
        link.limits, max_body_bytes=preamble + too_few
    )
    _, stream, offer, body = await offered(pair)
    assert offer.mapped is None and len(body) == preamble
    stream.send(Cancel())
    await until(lambda: not pair.buffer.statistics().leased)


async def test_parts_are_told_once_they_are_granted(pair: GpuPair) -> None:
    await inserted(pair, noise(MIB))
    hearer, stream, offer, body = await offered(pair)
    assert offer.mapped is not None and offer.complete and not offer.inline
    manifest, places = unpack_mapped(body, offer.mapped.nbytes, inline=False)
    assert [*manifest.layout.specs] == ["key", "hidden"]
    assert places[0] is not None
    stream.send(Grant(offer.transfer - 2, "cuda_ipc", "off"))  # of none that stands
    stream.send(Grant(offer.transfer, "cuda_ipc", "off"))
    told = [(await hearer.next())[0] for _ in range(2)]
    edges = next(frame for frame in told if isinstance(frame, Sent))
    assert (edges.part, edges.kind) == (0, "edges") and edges.digest
    assert any(isinstance(frame, Eager) for frame in told)
    stream.send(Ack(offer.token))
    await until(lambda: not pair.buffer.statistics().entries)
    assert pair.pinned_bytes == MIB  # it was never let go
    stream.send(Grant(offer.transfer, "cuda_ipc", "off"))  # too late
    assert await pair.peer.lookup.peek([1]) == 0


@pytest.mark.parametrize("later", [0, 2], ids=["again", "never offered"])
async def test_a_grant_that_makes_no_sense_ends_the_link(
    gpus: FakeGpus, later: int
) -> None:
    async with open_gpu_pair(gpus, reconnect_s=0) as pair:
        await inserted(pair, noise(MIB))
        hearer, stream, offer, _ = await offered(pair)
        stream.send(Grant(offer.transfer, "cuda_ipc", "off"))
        stream.send(Grant(offer.transfer + later, "cuda_ipc", "off"))
        await hearer.loss()


async def test_what_is_shown_may_be_wanted_by_lanes(pair: GpuPair) -> None:
    await inserted(pair, noise(MIB))
    hearer, stream, offer, _ = await offered(pair)
    link, landed = pair.peer._linked(), list[BaseException | None]()
    memory = memoryview(bytearray(MIB))
    link.payload.announce(offer.transfer)
    link.payload.receive(
        offer.transfer, 0, memory, lambda _, error: landed.append(error)
    )
    stream.send(Grant(offer.transfer))
    await until(lambda: len(hearer.frames) == 3)
    said = [frame.route for frame, _ in hearer.frames if isinstance(frame, Sent)]
    assert said == ["link"]
    await until(lambda: landed == [None])
    assert memory == bytes_of(noise(MIB))
    stream.send(Cancel())
    await until(lambda: not pair.buffer.statistics().leased)


async def test_who_closed_the_memory_before_it_is_told_is_told_so_once(
    pair: GpuPair, caplog: pytest.LogCaptureFixture
) -> None:
    await pair.buffer.insert([1], None, noise(MIB), noise(MIB), None)
    hearer, stream, offer, _ = await offered(pair)
    importer = importer_of(pair)
    importer.close()
    await until(lambda: not importer.is_connected)
    stream.send(Grant(offer.transfer, "cuda_ipc", "off"))
    assert "closed the memory" in str(await hearer.next())
    await until(lambda: not pair.buffer.statistics().leased)
    assert caplog.text.count("through host memory") == 1
    assert not pair.pinned_bytes and not pair.buffer.statistics().mapped_by


async def test_of_a_delivery_that_was_ended_so_nothing_more_is_begun(
    pair: GpuPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = list[int]()
    copy = D2HCopier.copy

    async def note(self: D2HCopier, source: Source, *anything: object) -> None:
        begun.append(source.nbytes)
        await copy(self, source, *anything)  # type: ignore[arg-type]

    monkeypatch.setattr(D2HCopier, "copy", note)
    await inserted(pair, noise(MIB))
    _, stream, offer, _ = await offered(pair)
    importer = importer_of(pair)
    importer.close()
    await until(lambda: not importer.is_connected)
    stream.send(Grant(offer.transfer, "cuda_ipc", "off"))
    await until(lambda: not pair.buffer.statistics().leased)
    assert await pair.peer.lookup.peek([1]) == 1  # a round trip later
    assert not begun


@pytest.mark.parametrize("nbytes", [8, MIB])
async def test_a_grant_of_what_was_not_shown_ends_the_link(
    gpus: FakeGpus, nbytes: int
) -> None:
    url = "?payload=inline"
    async with open_gpu_pair(gpus, device=None, url=url, reconnect_s=0) as pair:
        await inserted(pair, noise(nbytes))
        hearer = Hearer()
        link = pair.peer._linked()
        stream = link.open_stream(hearer, Select(has_key=False))
        offer, _ = await hearer.next()
        assert isinstance(offer, Offer) and offer.mapped is None
        assert offer.on_gpu is (nbytes == MIB)
        stream.send(Grant(offer.transfer, "cuda_ipc", "off"))
        with pytest.raises(PeerLost):
            await hearer.next()


@contextlib.asynccontextmanager
async def asking(
    device: Device | None, asks: OpenMemory, end: str = ""
) -> AsyncIterator[tuple[LookupBuffer, Link, Hearer, LinkStream]]:
    """Ask a server for the memory of its buffer, in the host or on a GPU."""
    async with (
        LookupBuffer("1MiB", device=device, drain_s=0) as buffer,
        serve(f"tcp://127.0.0.1:0{end}", lookup=buffer) as server,
        dialled(server.url, "consumer") as link,
    ):
        hearer = Hearer()
        yield buffer, link, hearer, link.open_stream(hearer, asks)


IN_HOST = OpenMemory("lookup")


def on(gpu: FakeDevice) -> OpenMemory:
    return OpenMemory("lookup", gpu.process.cuda.uuid(0))


@pytest.mark.parametrize("on_gpu", [False, True])
@pytest.mark.parametrize(
    ("said", "answer"),
    [(Proved(b"x" * 16), "not what the memory holds"), (Cancel(), "Cancelled")],
)
async def test_who_proves_nothing_has_nothing(
    gpu: FakeDevice, on_gpu: bool, said: Frame, answer: str
) -> None:
    asks = on(gpu) if on_gpu else IN_HOST
    device = gpu.device if on_gpu else None
    async with asking(device, asks) as (buffer, _, hearer, stream):
        assert isinstance((await hearer.next())[0], Exposed)
        stream.send(said)
        assert answer in str(await hearer.next())
        await until(lambda: buffer.exporter._door is None)


@pytest.mark.parametrize("on_gpu", [False, True])
@pytest.mark.parametrize("again", [False, True])
async def test_what_makes_no_sense_of_shown_memory_breaks_the_link(
    gpu: FakeDevice, on_gpu: bool, again: bool
) -> None:
    asks = on(gpu) if on_gpu else IN_HOST
    device = gpu.device if on_gpu else None
    async with asking(device, asks) as (_, link, hearer, stream):
        assert isinstance((await hearer.next())[0], Exposed)
        if again:
            link.open_stream(Hearer(), asks)
        else:
            stream.send(Grant(1))
        cause = str((await hearer.loss()).__cause__)
        assert ("maps memory once" if again else "Grant") in cause


@pytest.mark.parametrize(
    ("on_gpu", "by_gpu", "end", "why"),
    [
        (True, True, "?payload=inline", "no memory of a GPU"),
        (False, True, "", "no memory of a GPU"),
        (True, False, "", "no memory that could be mapped"),
        (False, False, "?payload=inline", "no memory that could be mapped"),
    ],
)
async def test_memory_that_is_not_shown_so_is_refused(
    gpu: FakeDevice, on_gpu: bool, by_gpu: bool, end: str, why: str
) -> None:
    asks = on(gpu) if by_gpu else IN_HOST
    device = gpu.device if on_gpu else None
    async with asking(device, asks, end) as (_, _, hearer, _):
        assert why in str(await hearer.next())


async def test_a_process_without_files_to_spare_shows_nothing(
    monkeypatch: pytest.MonkeyPatch, gpu: FakeDevice
) -> None:
    def refuse() -> None:
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr(exporter, "FdDoor", refuse)
    async with asking(gpu.device, on(gpu)) as (_, _, hearer, _):
        assert "no memory of a GPU" in str(await hearer.next())


async def test_a_peer_on_another_gpu_is_told_which_one_the_memory_is_on(
    gpu: FakeDevice,
) -> None:
    elsewhere = OpenMemory("lookup", "0" * 32)
    async with asking(gpu.device, elsewhere) as (_, _, hearer, _):
        frame, _ = await hearer.next_of(Exposed)
        assert frame.gpu_uuid == gpu.process.cuda.uuid(0)


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
    async with (
        serve("mem://", lookup=local) as server,
        dialled(server.url, "producer") as link,
    ):
        raw = RawInsert(link, MIB, streaming=True)
        await raw.granted()
        raw.stream.send(Sent(await raw.push(), 0, b"", "off", "nccl"))
        await until(lambda: not link.is_open)
        assert "not asked for" in str(link.error)


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
