"""GPUs of peers that say what they like."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from typing import Any

import pytest

from asynckv import LookupBuffer, Server, connect, serve
from asynckv.buffers.serving import devices
from asynckv.buffers.serving.devices import PeerImport
from asynckv.devices.growth import Growth
from asynckv.devices.names import Device
from asynckv.errors import ConfigError, GPUFailed, LocalProtocolError, PeerLost
from asynckv.links.dial import dial
from asynckv.links.fd_socket import has_fd_sockets
from asynckv.links.link import Link, LinkStream
from asynckv.protocol.frames import Cancel, Cancelled, Failure, Frame, Offer, Select
from asynckv.protocol.transfer_frames import Exposed, Grant, OpenDevices, OpenMemory
from asynckv.sharing import imports
from asynckv.sharing.gpu_channel import DeviceStream
from asynckv.testing import until
from asynckv.testing.lookup_checks.values import MIB, noise
from asynckv.transports.nccl import worker as workers
from harness.fake_devices import FakeDevice, fake_device_of
from harness.fake_gpus import FakeGpus
from harness.gpu_pairs import GpuPair, NcclBuffers, open_gpu_pair
from harness.link_pairs import Hearer, dialled, name_of

BY_HANDLES = pytest.mark.skipif(not has_fd_sockets(), reason="no sockets for handles")


async def ask(url: str) -> None:
    """Ask for a way with a description that is none."""
    link = await dial(url, identity=name_of("consumer"))
    try:
        channel = DeviceStream(answers=False)
        channel.ask(link, b"nonsense")
        await channel.description()
        channel.attach(lambda frame: None, lambda error: None)
        await until(lambda: channel._error is not None)
        assert channel._error is not None
        raise channel._error
    finally:
        await link.aclose()


async def test_nothing_comes_to_host_memory_from_a_gpu(
    local: LookupBuffer, mappable: Server
) -> None:
    async with connect(mappable.url):
        (services,) = mappable._services
        assert services.devices is not None
        assert services.devices.device_route(on_gpu=True) is None


async def test_a_server_that_is_aborted_opens_no_way(two_gpus: FakeGpus) -> None:
    ours, theirs = two_gpus.process(), two_gpus.process()
    device = fake_device_of(ours).device
    async with (
        LookupBuffer("1MiB", device=device, drain_s=0) as lookup,
        serve("tcp://127.0.0.1:0", lookup=lookup) as server,
    ):
        other = fake_device_of(theirs, 1).device
        peer = connect(server.url, device=other, max_bytes="1MiB", reconnect_s=0)
        entering = asyncio.create_task(peer.__aenter__())
        await until(
            lambda: any(s.devices and s.devices.tasks for s in server._services)
        )
        server.abort()
        with pytest.raises(PeerLost):
            await entering
        await peer.aclose()


async def test_a_grant_of_what_is_not_offered_any_more_is_late(
    nccl_pair: NcclBuffers,
) -> None:
    await nccl_pair.buffer.insert([1], None, noise(8), None, None)
    hearer, link = Hearer(), nccl_pair.peer._linked()
    link.open_stream(hearer, Select(has_key=False))
    offer, _ = await hearer.next_of(Offer)
    stream = link.open_stream(
        DeviceStream(answers=False), Select(has_key=True), bytes(8)
    )
    stream.send(Grant(offer.transfer, "nccl", "off"))
    assert await nccl_pair.peer.lookup.peek([5]) == 0
    assert link.is_open and nccl_pair.buffer.statistics().waiting_selects == 1


async def test_what_a_lost_way_did_not_send_is_not_said_to_be_sent(
    nccl_pair: NcclBuffers,
) -> None:
    await nccl_pair.buffer.insert([1], None, noise(MIB), None, None)
    hearer, link, way = Hearer(), nccl_pair.peer._linked(), nccl_pair.way
    stream = link.open_stream(hearer, Select(has_key=False))
    offer, _ = await hearer.next_of(Offer)
    way.transport.abort()
    stream.send(Grant(offer.transfer, "nccl", "off"))
    assert await nccl_pair.peer.lookup.peek([1]) == 0  # and so the grant was heard
    await until(lambda: not way.transport.sender)  # it was told
    assert len(hearer.frames) == 1 and link.is_open


async def test_who_has_opened_no_way_cannot_grant_memory_for_one(
    gpus: FakeGpus,
) -> None:
    device = fake_device_of(gpus.process()).device
    async with (
        LookupBuffer("4MiB", device=device, drain_s=0) as buffer,
        serve("tcp://127.0.0.1:0", lookup=buffer) as server,
    ):
        await buffer.insert([1], None, noise(MIB), None, None)
        link = await dial(server.url, identity=name_of("consumer"))
        stream = link.open_stream(hearer := Hearer(), Select(has_key=False))
        offer, _ = await hearer.next()
        assert isinstance(offer, Offer) and offer.on_gpu
        stream.send(Grant(offer.transfer, "nccl", "off"))
        assert "nothing leads to" in str((await hearer.loss()).__cause__)
        await link.aclose()
        await until(lambda: not buffer.statistics().leased)


async def test_what_rides_alone_cannot_be_granted_a_gpus_memory(
    nccl_pair: NcclBuffers,
) -> None:
    await nccl_pair.buffer.insert([1], None, noise(8), None, None)
    hearer, link = Hearer(), nccl_pair.peer._linked()
    stream = link.open_stream(hearer, Select(has_key=False))
    offer, _ = await hearer.next()
    assert isinstance(offer, Offer) and not offer.on_gpu
    stream.send(Grant(offer.transfer, "nccl", "off"))
    await until(lambda: not link.is_open)
    assert "nothing leads to" in str(link.error)
    assert await nccl_pair.buffer.peek([1]) == 1


async def test_a_server_that_has_left_moves_nothing_on_its_gpu(
    nccl_pair: NcclBuffers,
) -> None:
    way = nccl_pair.way
    await nccl_pair.server.aclose()
    assert way.transport.is_quiet and not nccl_pair.server._services
    assert (nccl_pair.ours.process.cuda, 0) not in workers._workers


NOWHERE = Exposed(f"asynckv-{0:032}", b"t" * 16, 2 * MIB + 512, b"h" * 64)


@pytest.fixture
def gpu(gpus: FakeGpus) -> FakeDevice:
    return fake_device_of(gpus.process())


@pytest.fixture
async def server(gpu: FakeDevice) -> AsyncIterator[Server]:
    async with (
        LookupBuffer("1MiB", device=gpu.device, drain_s=0) as buffer,
        serve("tcp://127.0.0.1:0", lookup=buffer) as server,
    ):
        yield server


@pytest.fixture
async def link(server: Server) -> AsyncIterator[Link]:
    async with dialled(server.url, "producer") as link:
        yield link


def show(gpu: FakeDevice, link: Link, *frames: Frame) -> tuple[Hearer, LinkStream]:
    hearer = Hearer()
    stream = link.open_stream(hearer, OpenMemory("inserts", gpu.process.cuda.uuid(0)))
    for frame in frames:
        stream.send(frame)
    return hearer, stream


def sources_of(server: Server) -> PeerImport:
    (services,) = server._services
    assert services.devices is not None
    return services.devices.peer_import


async def wait_for_ever(*anything: object) -> Any:
    await asyncio.Event().wait()


@BY_HANDLES
async def test_memory_to_put_from_is_shown_once(gpu: FakeDevice, link: Link) -> None:
    show(gpu, link)
    hearer, _ = show(gpu, link)
    assert "once" in str((await hearer.loss()).__cause__)


@BY_HANDLES
@pytest.mark.parametrize("frames", [(NOWHERE, NOWHERE), (Grant(1),)])
async def test_what_makes_no_sense_breaks_the_link(
    monkeypatch: pytest.MonkeyPatch,
    gpu: FakeDevice,
    link: Link,
    frames: tuple[Frame, ...],
) -> None:
    monkeypatch.setattr(imports, "import_gpu", wait_for_ever)
    hearer, _ = show(gpu, link, *frames)
    assert "belongs here" in str((await hearer.loss()).__cause__)


@BY_HANDLES
async def test_what_cannot_be_opened_is_refused(
    gpu: FakeDevice, link: Link, server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, devices.__name__)
    hearer, _ = show(gpu, link, NOWHERE)
    assert isinstance((await hearer.next())[0], Failure)
    assert "is not read in a GPU" in caplog.text
    assert sources_of(server)._memory._imported is None


@BY_HANDLES
async def test_a_buffer_that_is_closed_meanwhile_is_not_read_to(
    monkeypatch: pytest.MonkeyPatch, gpu: FakeDevice, link: Link, server: Server
) -> None:
    hearer, stream = show(gpu, link)
    await until(lambda: bool(server._services) and bool(sources_of(server)._opening))
    monkeypatch.setattr(Growth, "allocation", None)
    stream.send(NOWHERE)
    assert "closed meanwhile" in str(await hearer.next())


@BY_HANDLES
@pytest.mark.parametrize("frames", [(), (NOWHERE,)], ids=["early", "late"])
async def test_who_cancels_is_not_read(
    monkeypatch: pytest.MonkeyPatch,
    gpu: FakeDevice,
    link: Link,
    server: Server,
    frames: tuple[Frame, ...],
) -> None:
    monkeypatch.setattr(imports, "import_gpu", wait_for_ever)
    hearer, stream = show(gpu, link, *frames)
    stream.send(Cancel())
    assert await hearer.next() == (Cancelled(), b"")
    assert not sources_of(server)._memory.is_open


@BY_HANDLES
async def test_what_is_opened_when_the_peer_has_cancelled_is_closed(
    monkeypatch: pytest.MonkeyPatch, gpu: FakeDevice, link: Link, server: Server
) -> None:
    has_begun, may_end, closed = asyncio.Event(), asyncio.Event(), list[bool]()

    class Opened:
        def close_soon(self, done: asyncio.Future[None]) -> None:
            closed.append(True)
            done.set_result(None)

    async def open_late(*anything: object) -> Any:
        has_begun.set()
        await may_end.wait()
        return Opened(), b"nonce"

    monkeypatch.setattr(imports, "import_gpu", open_late)
    hearer, stream = show(gpu, link, NOWHERE)
    await has_begun.wait()
    stream.send(Cancel())
    assert await hearer.next() == (Cancelled(), b"")
    may_end.set()
    await until(lambda: bool(closed))
    assert not sources_of(server)._memory.is_open


@BY_HANDLES
async def test_a_link_that_is_lost_ends_the_opening(
    monkeypatch: pytest.MonkeyPatch, gpu: FakeDevice, link: Link, server: Server
) -> None:
    monkeypatch.setattr(imports, "import_gpu", wait_for_ever)
    show(gpu, link, NOWHERE)
    await until(lambda: bool(server._services))
    sources = sources_of(server)
    await until(lambda: sources._opening is not None)
    link.abort()
    opening = sources._opening
    assert opening is not None
    await until(opening.done)
    assert opening.cancelled()


@pytest.fixture
async def pair(gpus: FakeGpus) -> AsyncIterator[GpuPair]:
    async with open_gpu_pair(gpus, reconnect_s=0) as pair:
        yield pair


@BY_HANDLES
async def test_what_is_lost_is_told_once_and_not_after_the_link(
    pair: GpuPair, caplog: pytest.LogCaptureFixture
) -> None:
    sources = sources_of(pair.server)
    for _ in range(2):
        sources._lost(GPUFailed("it has fallen off the bus"))
    await until(lambda: "has fallen off" in caplog.text)
    assert caplog.text.count("has fallen off") == 1
    await until(lambda: not pair.ours.process.cuda._opened)


@BY_HANDLES
async def test_a_server_that_leaves_has_nothing_open(pair: GpuPair) -> None:
    assert pair.ours.process.cuda._opened
    await pair.server.aclose()
    assert not pair.ours.process.cuda._opened


@BY_HANDLES
async def test_the_end_of_a_link_is_no_news_to_who_reads(
    pair: GpuPair, caplog: pytest.LogCaptureFixture
) -> None:
    sources, link = sources_of(pair.server), pair.peer._linked()
    services = next(iter(pair.server._services))
    services.link.abort()
    sources._lost(GPUFailed("it has fallen off the bus"))
    assert not caplog.records
    await until(lambda: not (link.is_open or pair.ours.process.cuda._opened))


@contextlib.asynccontextmanager
async def serving(device: Device | None, end: str = "") -> AsyncIterator[Server]:
    async with (
        LookupBuffer("1MiB", device=device, drain_s=0) as buffer,
        serve(f"tcp://127.0.0.1:0{end}", lookup=buffer) as server,
    ):
        yield server


@pytest.mark.parametrize(
    ("on_gpu", "end", "error", "why"),
    [
        (False, "", ConfigError, "no GPU to send from"),
        (True, "?payload=inline", ConfigError, "no GPU to send from"),
        (True, "", LocalProtocolError, "no description"),
    ],
)
async def test_no_way_leads_to_who_describes_no_gpu_or_from_where_there_is_none(
    gpu: FakeDevice, on_gpu: bool, end: str, error: type[Exception], why: str
) -> None:
    async with serving(gpu.device if on_gpu else None, end) as server:
        with pytest.raises(error, match=why):
            await ask(server.url)


@BY_HANDLES
@pytest.mark.parametrize(
    ("on_gpu", "end", "their_end", "why"),
    [
        (False, "", "", "no memory of a GPU"),
        (True, "?payload=inline", "", "Failure("),
        (True, "?payload=map", "", "Failure("),
        (True, "", "?payload=inline", "no memory of a GPU"),
    ],
)
async def test_nothing_is_read_on_no_gpu_nor_by_a_link_that_shares_no_memory(
    gpu: FakeDevice, on_gpu: bool, end: str, their_end: str, why: str
) -> None:
    async with (
        serving(gpu.device if on_gpu else None, end) as server,
        dialled(server.url + their_end, "producer") as link,
    ):
        hearer, _ = show(gpu, link, NOWHERE)
        assert why in str(await hearer.next())


@pytest.mark.parametrize("frame", [OpenDevices(b""), Grant(1, "nccl", "off")])
async def test_what_makes_no_sense_ends_the_link(
    server: Server, frame: OpenDevices | Grant
) -> None:
    async with dialled(server.url, "consumer") as link:
        channel = DeviceStream(answers=False)
        if isinstance(frame, OpenDevices):
            for _ in range(2):
                link.open_stream(channel, frame)
        else:
            link.open_stream(channel, Select(has_key=False)).send(frame)
        await until(lambda: not link.is_open)
