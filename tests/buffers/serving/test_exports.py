"""Memory of a GPU that is shown to peers that say what they like."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import AsyncIterator

import msgspec
import pytest
import torch

from asynckv import LookupBuffer, PeerLost, serve
from asynckv.buffers.entries.entries import StoredEntry
from asynckv.buffers.serving.select import export_entry
from asynckv.devices.names import Device
from asynckv.links.dial import dial
from asynckv.links.fd_socket import has_fd_sockets
from asynckv.links.link import Link, LinkStream
from asynckv.protocol.frames import Ack, Cancel, Frame, Offer, Select
from asynckv.protocol.transfer_frames import (
    Eager,
    Exposed,
    Grant,
    OpenMemory,
    Proved,
    Sent,
)
from asynckv.protocol.values import MappedOffer, Place
from asynckv.sharing import exporter
from asynckv.sharing.exporter import Importer, Pin
from asynckv.tensors.views import bytes_of
from asynckv.testing import until
from asynckv.testing.lookup_checks.values import MIB, noise
from asynckv.transfers.host_copies import D2HCopier
from asynckv.transfers.manifest import unpack_mapped
from asynckv.transfers.source import Source
from harness.fake_devices import FakeDevice
from harness.fake_gpus import FakeGpus
from harness.gpu_pairs import GpuPair, open_gpu_pair
from harness.link_pairs import Hearer, name_of

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
    ):
        link = await dial(server.url, identity=name_of("consumer"))
        hearer = Hearer()
        yield buffer, link, hearer, link.open_stream(hearer, asks)
        await link.aclose()


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
