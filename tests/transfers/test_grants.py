"""Which grants count, what a later one asks for, and what is said of parts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from asynckv.devices.arena import DeviceArena, DeviceRegion, place_of
from asynckv.devices.copying import EDGE_NBYTES, CopyPool
from asynckv.errors import RemoteProtocolError
from asynckv.links.fd_socket import has_fd_sockets
from asynckv.links.link import Link
from asynckv.protocol.frames import Cancel, Frame, Get
from asynckv.protocol.handshake import DigestMode
from asynckv.protocol.transfer_frames import Eager, Exposed, Grant, Sent
from asynckv.protocol.wire import digest_of
from asynckv.sharing.exporter import Importer
from asynckv.sharing.gpu_channel import GpuLink
from asynckv.tensors.arena import HeapArena, Region
from asynckv.tensors.views import bytes_of
from asynckv.testing.blocked import until
from asynckv.testing.lookup_checks.values import MIB, noise
from asynckv.transfers.host_copies import D2HCopier
from asynckv.transfers.outgoing import GpuImporter, Outgoing, Routes
from asynckv.transfers.source import (
    GpuSource,
    GpuStaging,
    HostSource,
    RegionSource,
    Source,
    StagedTensor,
)
from asynckv.types import TensorSpec
from harness.device_memory import filled_region, open_device_arena
from harness.fake_devices import FakeDevice
from harness.gpu_pairs import GpuPair
from harness.link_pairs import Hearer, LinkPair, NoRoutes, linked
from harness.nccl_buffer_pairs import NcclBuffers

needs_sockets = pytest.mark.skipif(
    not has_fd_sockets(), reason="no sockets for handles"
)

SMALL = 8


def refuse(error: Exception) -> None:
    raise AssertionError(error)


class Ends:
    """A link on which one transfer is offered, and who would hear and receive it."""

    def __init__(self, links: LinkPair) -> None:
        self._links = links
        self.stream = links.near.open_stream(Hearer(), Get("k"))
        self.transfer = links.near.new_transfer()

    def outgoing(
        self, *sources: Source, routes: Routes | None = None, **options: Any
    ) -> Outgoing:
        outgoing = Outgoing(
            *(self.stream, self.transfer, routes), failed=refuse, **options
        )
        for part, source in enumerate(sources):
            outgoing.add(part, source)
        return outgoing

    def receive(self, part: int) -> memoryview:
        target = memoryview(bytearray(MIB))
        payload = self._links.far.payload
        payload.receive(self.transfer, part, target, lambda *_: None)
        return target

    async def said(self, outgoing: Outgoing) -> list[Frame]:
        """Return what the peer has heard when nothing is under way any more."""
        await until(lambda: not outgoing.is_busy)
        await asyncio.sleep(0)  # what is eager leaves then
        self.stream.send(Cancel())
        await until(lambda: bool(self._links.service.hearers))
        frames = self._links.service.hearers[0].frames
        await until(lambda: bool(frames) and frames[-1] == (Cancel(), b""))
        return [frame for frame, _ in frames if not isinstance(frame, Cancel)]


@asynccontextmanager
async def offered() -> AsyncIterator[Ends]:
    async with linked("mem://", lambda *_: None) as links:
        yield Ends(links)


@pytest.fixture
async def ends() -> AsyncIterator[Ends]:
    async with offered() as ends:
        yield ends


async def test_a_grant_of_what_has_ended_sends_nothing(ends: Ends) -> None:
    outgoing = ends.outgoing(HostSource(noise(SMALL)))
    outgoing.on_grant(Grant(ends.transfer - 2))
    outgoing.on_grant(Grant(ends.transfer - 2, "nccl", "full"))
    outgoing.stop()
    outgoing.on_grant(Grant(ends.transfer))
    assert await ends.said(outgoing) == []


async def test_many_parts_leave_in_several_turns_of_the_loop(ends: Ends) -> None:
    outgoing = ends.outgoing(*[HostSource(noise(SMALL)) for _ in range(150)])
    outgoing.on_grant(Grant(ends.transfer))
    assert outgoing.is_busy
    said = await ends.said(outgoing)
    sent = [part for frame in said if isinstance(frame, Eager) for part in frame.parts]
    assert sent == list(range(150))


async def test_what_is_there_as_many_leave_goes_behind_them(ends: Ends) -> None:
    outgoing = ends.outgoing(*[HostSource(noise(SMALL)) for _ in range(150)])
    outgoing.on_grant(Grant(ends.transfer))
    outgoing.add(150, HostSource(noise(SMALL)))
    said = await ends.said(outgoing)
    sent = [part for frame in said if isinstance(frame, Eager) for part in frame.parts]
    assert sent == list(range(151))


async def test_what_is_stopped_meanwhile_does_not_leave(ends: Ends) -> None:
    outgoing = ends.outgoing(*[HostSource(noise(SMALL)) for _ in range(150)])
    outgoing.on_grant(Grant(ends.transfer))
    outgoing.stop()
    assert not outgoing.is_busy and await ends.said(outgoing) == []


@pytest.mark.parametrize("is_over", [False, True])
async def test_a_grant_of_what_was_never_offered_makes_no_sense(
    ends: Ends, is_over: bool
) -> None:
    outgoing = ends.outgoing(HostSource(noise(SMALL)))
    if is_over:
        outgoing.stop()
    with pytest.raises(RemoteProtocolError, match="never offered"):
        outgoing.on_grant(Grant(ends.transfer + 2))


async def test_what_is_there_later_leaves_then(ends: Ends) -> None:
    outgoing = ends.outgoing()
    outgoing.on_grant(Grant(ends.transfer))
    ends.receive(1)
    outgoing.add(0, HostSource(noise(SMALL)))
    outgoing.add(1, HostSource(noise(MIB)))
    said = await ends.said(outgoing)
    assert {type(frame) for frame in said} == {Eager, Sent}


async def test_a_second_grant_sends_everything_anew(ends: Ends) -> None:
    outgoing = ends.outgoing(HostSource(noise(SMALL)), HostSource(noise(MIB)))
    for _ in range(2):
        ends.receive(1)
        outgoing.on_grant(Grant(ends.transfer))
        said = await ends.said(outgoing)
    assert [type(frame) for frame in said if isinstance(frame, Sent)] == [Sent] * 2
    assert [type(frame) for frame in said if isinstance(frame, Eager)] == [Eager] * 2


@pytest.mark.parametrize("is_on_gpu", [False, True])
async def test_where_nothing_leads_to_no_gpu_is_granted(
    ends: Ends, is_on_gpu: bool
) -> None:
    routes = None if is_on_gpu else NoRoutes()
    outgoing = ends.outgoing(routes=routes, is_on_gpu=is_on_gpu)
    with pytest.raises(RemoteProtocolError, match="nothing leads to"):
        outgoing.on_grant(Grant(ends.transfer, "nccl", "full"))


async def test_without_any_routes_nothing_is_read_on_a_gpu(
    ends: Ends, gpu: FakeDevice
) -> None:
    pool = CopyPool(lanes=gpu.lanes())
    memory = pool.catch(gpu.tensor(noise(MIB)))
    outgoing = ends.outgoing(GpuSource(memory))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="nothing reads"):
        outgoing.on_grant(Grant(ends.transfer))
    pool.close()


class ByNccl(NoRoutes):
    """A side that has what leads from GPU to GPU, be that over or not."""

    def __init__(self, pool: CopyPool, nccl: GpuLink | None) -> None:
        super().__init__(pool)
        self._nccl = nccl

    def nccl(self, link: Link) -> GpuLink | None:
        return self._nccl

    def d2h(self, link: Link) -> D2HCopier:
        return D2HCopier(self.pool, self.copies)


async def on_gpu(arena: DeviceArena, pool: CopyPool, nbytes: int) -> RegionSource:
    (region,), spec = arena.take_spares([nbytes]) or [], TensorSpec((nbytes,), "uint8")
    assert isinstance(region, DeviceRegion)
    await pool.copy([noise(nbytes)], [place_of(region, spec)])
    return RegionSource(region, spec)


async def test_small_parts_leave_once_when_a_route_between_gpus_is_lost(
    ends: Ends, gpu: FakeDevice, pool: CopyPool
) -> None:
    with open_device_arena(gpu) as arena:
        large, small = [await on_gpu(arena, pool, n) for n in (MIB, SMALL)]
        in_host, routes = HostSource(noise(SMALL)), ByNccl(pool, None)
        outgoing = ends.outgoing(large, small, in_host, routes=routes, is_on_gpu=True)
        outgoing.on_grant(Grant(ends.transfer, "nccl", "full"))
        await asyncio.sleep(0)  # one small part has left, the other is being copied
        target = ends.receive(0)
        outgoing.on_grant(Grant(ends.transfer))
        said = await ends.said(outgoing)
        eager = [frame.parts for frame in said if isinstance(frame, Eager)]
        assert sorted(part for parts in eager for part in parts) == [1, 2]
        assert [type(f) for f in said if not isinstance(f, Eager)] == [Sent]
        assert torch.equal(torch.frombuffer(target, dtype=torch.uint8), noise(MIB))
        await outgoing.quiesce()
        arena.free([large.region, small.region])


async def test_of_what_was_not_sent_the_peer_hears_nothing(
    ends: Ends, nccl_pair: NcclBuffers
) -> None:
    buffer, nccl = nccl_pair.buffer, nccl_pair.devices.way
    assert nccl is not None
    await buffer.insert([1], None, noise(MIB), None, None)
    (entry,) = buffer.ledger.table.entries.values()
    source = RegionSource(entry.regions[0], TensorSpec((MIB,), "uint8"))
    errors = list[BaseException | None]()
    nccl.transport.abort()
    routes = ByNccl(buffer.pool, nccl)
    outgoing = ends.outgoing(source, routes=routes, is_on_gpu=True)
    outgoing.on_grant(Grant(ends.transfer, "nccl", "full"))
    place = source.place()
    nccl.transport.send(9, 0, place, lambda _, error: errors.append(error))  # type: ignore[arg-type]
    await until(lambda: bool(errors))
    assert errors[0] is not None and await ends.said(outgoing) == []
    outgoing.stop()


async def test_of_what_was_sent_when_nobody_needed_it_any_more_nothing_is_said(
    ends: Ends, gpu: FakeDevice, pool: CopyPool
) -> None:
    sent = list[Callable[[bytes, None], None]]()
    transport = SimpleNamespace(
        send=lambda *part: sent.append(part[-1]), stop=lambda transfer: None
    )
    nccl: Any = SimpleNamespace(digest="off", transport=transport)
    with open_device_arena(gpu) as arena:
        source = await on_gpu(arena, pool, MIB)
        outgoing = ends.outgoing(source, routes=ByNccl(pool, nccl), is_on_gpu=True)
        outgoing.on_grant(Grant(ends.transfer, "nccl", "off"))
        outgoing.stop()
        sent[0](b"", None)
        assert await ends.said(outgoing) == []
        arena.free([source.region])


def shown(digest: DigestMode) -> Importer:
    """Somebody reads where this side said that all lies."""
    exposed = Exposed("", b"", 0, digest=digest)
    fake: Any = SimpleNamespace(is_connected=True, exposed=exposed)
    importer: Importer = fake
    return importer


@pytest.mark.parametrize(
    ("kind", "edges", "digest", "said"),
    [
        ("off", b"", b"known", (b"", "off")),
        ("edges", b"", b"known", (b"known", "full")),  # says more than the edges
        ("edges", b"some", b"known", (b"some", "edges")),
        ("full", b"some", b"known", (b"known", "full")),
    ],
)
async def test_a_part_is_said_to_be_sent_with_what_both_want(
    ends: Ends,
    gpu: FakeDevice,
    pool: CopyPool,
    kind: DigestMode,
    edges: bytes,
    digest: bytes,
    said: tuple[bytes, DigestMode],
) -> None:
    with open_device_arena(gpu) as arena:
        region: Region = await filled_region(arena, pool, noise(MIB))
        assert isinstance(region, DeviceRegion)
        region.edges = edges
        source = RegionSource(region, TensorSpec((MIB,), "uint8"), digest)
        outgoing = ends.outgoing(source, exported=shown(kind))
        outgoing.on_grant(Grant(ends.transfer, "cuda_ipc", "off"))
        assert await ends.said(outgoing) == [Sent(ends.transfer, 0, *said, "cuda_ipc")]
        arena.free([region])


@pytest.mark.parametrize("is_stopped", [False, True])
async def test_what_has_no_digest_is_said_when_it_has_one(
    ends: Ends, is_stopped: bool
) -> None:
    class Digesting(CopyPool):
        async def digest(self, tensors: object) -> list[bytes]:
            await asyncio.sleep(0)
            return [b"made"]

    (region,) = HeapArena(MIB).allocate([MIB]) or []
    source = RegionSource(region, TensorSpec((MIB,), "uint8"))
    routes = NoRoutes(Digesting())
    outgoing = ends.outgoing(source, routes=routes, exported=shown("full"))
    outgoing.on_grant(Grant(ends.transfer, "cuda_ipc"))
    if is_stopped:
        outgoing.stop()
    said = [] if is_stopped else [Sent(ends.transfer, 0, b"made", route="cuda_ipc")]
    assert await ends.said(outgoing) == said


BYTES = bytes(bytes_of(noise(MIB, 1)))
WHOLE = digest_of(BYTES)
EDGES = digest_of(BYTES[:EDGE_NBYTES] + BYTES[-EDGE_NBYTES:])


def importer_of(pair: GpuPair) -> GpuImporter:
    importer = pair.peer.routes.importer(pair.peer._linked())
    assert importer is not None
    return importer


async def staged_in(pair: GpuPair) -> StagedTensor:
    staging = pair.peer.routes.staging(pair.peer._linked(), MIB)
    assert isinstance(staging, GpuStaging)
    found = await staging.staged(noise(MIB, 1))
    assert found is not None
    return found


@pytest.fixture
async def staged(pair: GpuPair) -> AsyncIterator[StagedTensor]:
    found = await staged_in(pair)
    yield found
    found.release()


class Granted:
    """One transfer, on a link of its own, and what is said of it."""

    def __init__(self, links: LinkPair, importer: GpuImporter | None) -> None:
        self._links = links
        self.stream = links.near.open_stream(Hearer(), Get("k"))
        self.outgoing = Outgoing(
            self.stream, 3, failed=refuse, importer=lambda link: importer
        )

    async def said(self) -> list[object]:
        """Return what the peer has heard when nothing more is to be said."""
        await until(lambda: not self.outgoing.is_busy)
        await asyncio.sleep(0)  # what is eager leaves then
        self.stream.send(Cancel())
        await until(lambda: bool(self._links.service.hearers))
        frames = self._links.service.hearers[0].frames
        await until(lambda: bool(frames) and frames[-1] == (Cancel(), b""))
        return [frame for frame, _ in frames[:-1]]


@asynccontextmanager
async def granted(
    parts: Sequence[tuple[int, Source]],
    importer: GpuImporter | None,
    kind: DigestMode = "edges",
) -> AsyncIterator[Granted]:
    async with linked("mem://", lambda *_: None) as links:
        one = Granted(links, importer)
        for part, source in parts:
            one.outgoing.add(part, source)
        one.outgoing.on_grant(Grant(3, "cuda_ipc", kind))
        yield one
        await one.outgoing.quiesce()


async def said_of(
    parts: Sequence[tuple[int, Source]],
    importer: GpuImporter | None,
    kind: DigestMode = "edges",
) -> list[object]:
    async with granted(parts, importer, kind) as one:
        said = await one.said()
        shared = [frame for frame in said if isinstance(frame, Sent)]
        is_read = any(frame.offset is not None for frame in shared)
        assert one.outgoing.is_read is is_read
        one.outgoing.release()
        one.outgoing.release()
        assert not one.outgoing.is_read
        return said


@needs_sockets
@pytest.mark.parametrize(
    ("kind", "known", "said", "digest"),
    [
        ("edges", None, "edges", EDGES),
        ("full", None, "full", WHOLE),
        ("off", None, "off", b""),
        ("off", b"", "off", b""),
        ("off", b"known already...", "off", b""),
        ("edges", b"known already...", "full", b"known already..."),
    ],
)
async def test_a_part_is_told_of_with_its_place_and_digest(
    pair: GpuPair,
    staged: StagedTensor,
    kind: DigestMode,
    known: bytes | None,
    said: DigestMode,
    digest: bytes,
) -> None:
    staged.digest = known or b""
    staged.region.edges = b""
    frames = await said_of([(2, staged)], importer_of(pair), kind)
    assert frames == [Sent(3, 2, digest, said, "cuda_ipc", staged.region.start)]


@needs_sockets
async def test_the_edges_of_several_parts_are_said_each_with_its_own(
    pair: GpuPair, staged: StagedTensor
) -> None:
    other = await staged_in(pair)
    other.digest = b"known already..."
    staged.region.edges = other.region.edges = b""
    frames = await said_of([(0, other), (1, staged)], importer_of(pair))
    offsets = other.region.start, staged.region.start
    assert frames == [
        Sent(3, 0, b"known already...", "full", "cuda_ipc", offsets[0]),
        Sent(3, 1, EDGES, "edges", "cuda_ipc", offsets[1]),
    ]
    other.release()


@needs_sockets
async def test_edges_that_were_read_already_are_not_read_again(
    pair: GpuPair, staged: StagedTensor
) -> None:
    staged.digest, staged.region.edges = b"known already...", b"read already"
    (frame,) = await said_of([(0, staged)], importer_of(pair))
    offset = staged.region.start
    assert frame == Sent(3, 0, b"read already", "edges", "cuda_ipc", offset)


@needs_sockets
async def test_one_part_that_lies_elsewhere_is_all_that_is_said(
    pair: GpuPair, staged: StagedTensor
) -> None:
    parts: list[tuple[int, Source]]
    parts = [(0, staged), (1, HostSource(noise(MIB)))]
    assert await said_of(parts, importer_of(pair)) == [
        Sent(3, 1, b"", "off", "cuda_ipc")
    ]
    assert await said_of(parts, None) == [Sent(3, 0, b"", "off", "cuda_ipc")]
    assert await said_of([], None) == []


@needs_sockets
async def test_small_parts_are_eager_all_the_same(
    pair: GpuPair, staged: StagedTensor
) -> None:
    small = HostSource(noise(8))
    said = await said_of([(0, small), (1, staged)], importer_of(pair), "off")
    assert {type(frame) for frame in said} == {Eager, Sent}
    assert [type(frame) for frame in await said_of([(0, small)], None)] == [Eager]


@needs_sockets
async def test_a_part_stays_until_the_reader_is_through(pair: GpuPair) -> None:
    staged = await staged_in(pair)
    async with granted([(0, staged)], importer_of(pair), "off") as one:
        staged.release()
        await one.said()
        one.outgoing.stop()
        assert pair.puts.staged_bytes == MIB
        one.outgoing.release()
        assert not pair.puts.staged_bytes


@needs_sockets
async def test_a_reader_that_is_gone_holds_nothing(pair: GpuPair) -> None:
    importer, staged = importer_of(pair), await staged_in(pair)
    async with granted([(0, staged)], importer, "off") as one:
        staged.release()
        await one.said()
        importer.importer.on_end()
        assert not pair.puts.staged_bytes
        one.outgoing.release()


@needs_sockets
async def test_who_is_gone_reads_nothing_more(pair: GpuPair) -> None:
    importer, link = importer_of(pair), pair.peer._linked()
    importer.importer.close()
    await until(lambda: not importer.importer.is_connected)
    assert pair.peer.routes.importer(link) is None
