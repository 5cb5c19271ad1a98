"""Which grants count, and what a later one asks for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from asynckv.devices.arena import DeviceArena, DeviceRegion, place_of
from asynckv.devices.copying import CopyPool
from asynckv.errors import RemoteProtocolError
from asynckv.links.link import Link
from asynckv.protocol.frames import Cancel, Frame, Get
from asynckv.protocol.handshake import DigestMode
from asynckv.protocol.transfer_frames import Eager, Exposed, Grant, Sent
from asynckv.sharing.exporter import Importer
from asynckv.sharing.gpu_channel import GpuLink
from asynckv.tensors.arena import HeapArena, Region
from asynckv.testing.blocked import until
from asynckv.testing.lookup_checks.values import MIB, noise
from asynckv.transfers.host_copies import D2HCopier
from asynckv.transfers.outgoing import Outgoing, Routes
from asynckv.transfers.source import GpuSource, HostSource, RegionSource, Source
from asynckv.types import TensorSpec
from harness.device_memory import filled_region, open_device_arena
from harness.fake_devices import FakeDevice
from harness.link_pairs import Hearer, LinkPair, linked
from harness.nccl_buffer_pairs import NcclBuffers
from harness.no_routes import NoRoutes

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


@pytest.mark.parametrize("nbytes", [SMALL, MIB])
async def test_what_is_still_leaving_is_not_granted_once_more(
    ends: Ends, nbytes: int
) -> None:
    outgoing = ends.outgoing(HostSource(noise(nbytes)))
    outgoing.on_grant(Grant(ends.transfer))
    with pytest.raises(RemoteProtocolError, match="still leaving"):
        outgoing.on_grant(Grant(ends.transfer))
    await outgoing.quiesce()


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
    region, spec = arena.take_spare(nbytes), TensorSpec((nbytes,), "uint8")
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
