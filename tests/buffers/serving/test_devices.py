from __future__ import annotations

import asyncio

import pytest

from asynckv.buffers.lookup import LookupBuffer
from asynckv.buffers.remote.peer import connect
from asynckv.buffers.serve import Server, serve
from asynckv.errors import ConfigError, LocalProtocolError, PeerLost
from asynckv.links.dial import dial
from asynckv.protocol.frames import Offer, Select
from asynckv.protocol.transfer_frames import Grant, OpenDevices
from asynckv.sharing.gpu_channel import DeviceStream
from asynckv.testing.blocked import until
from asynckv.testing.lookup_checks.values import MIB, noise
from asynckv.transports.nccl import worker as workers
from harness.fake_devices import fake_device_of
from harness.fake_gpus import FakeGpus
from harness.link_pairs import Hearer, name_of
from harness.nccl_buffer_pairs import open_nccl_buffers


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


async def test_a_buffer_in_host_memory_leads_nowhere(local: LookupBuffer) -> None:
    async with serve("tcp://127.0.0.1:0", lookup=local) as server:
        with pytest.raises(ConfigError, match="no GPU to send from"):
            await ask(server.url)


async def test_nothing_comes_to_host_memory_from_a_gpu(
    local: LookupBuffer, mappable: Server
) -> None:
    async with connect(mappable.url):
        (services,) = mappable._services
        assert services.devices is not None
        assert services.devices.device_route(on_gpu=True) is None


async def test_a_server_whose_url_asks_for_lanes_leads_nowhere(gpus: FakeGpus) -> None:
    device = fake_device_of(gpus.process()).device
    async with (
        LookupBuffer("1MiB", device=device, drain_s=0) as buffer,
        serve("tcp://127.0.0.1:0?payload=inline", lookup=buffer) as server,
    ):
        with pytest.raises(ConfigError, match="no GPU to send from"):
            await ask(server.url)


async def test_a_peer_that_describes_no_gpu_is_told_so(gpus: FakeGpus) -> None:
    device = fake_device_of(gpus.process()).device
    async with (
        LookupBuffer("1MiB", device=device, drain_s=0) as buffer,
        serve("tcp://127.0.0.1:0", lookup=buffer) as server,
    ):
        with pytest.raises(LocalProtocolError, match="no description"):
            await ask(server.url)


@pytest.mark.parametrize("frame", [OpenDevices(b""), Grant(1, "nccl", "off")])
async def test_what_makes_no_sense_ends_the_link(
    gpus: FakeGpus, frame: OpenDevices | Grant
) -> None:
    device = fake_device_of(gpus.process()).device
    async with (
        LookupBuffer("1MiB", device=device, drain_s=0) as buffer,
        serve("tcp://127.0.0.1:0", lookup=buffer) as server,
    ):
        await _say(server, frame)


async def _say(server: Server, frame: OpenDevices | Grant) -> None:
    link = await dial(server.url, identity=name_of("consumer"))
    channel = DeviceStream(answers=False)
    if isinstance(frame, OpenDevices):
        for _ in range(2):
            link.open_stream(channel, frame)
    else:
        link.open_stream(channel, Select(has_key=False)).send(frame)
    await until(lambda: not link.is_open)
    await link.aclose()


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
    two_gpus: FakeGpus,
) -> None:
    async with open_nccl_buffers(two_gpus) as pair:
        await pair.buffer.insert([1], None, noise(8), None, None)
        hearer, link = Hearer(), pair.peer._linked()
        link.open_stream(hearer, Select(has_key=False))
        offer, _ = await hearer.next()
        assert isinstance(offer, Offer)
        stream = link.open_stream(
            DeviceStream(answers=False), Select(has_key=True), bytes(8)
        )
        stream.send(Grant(offer.transfer, "nccl", "off"))
        assert await pair.peer.lookup.peek([5]) == 0
        assert link.is_open and pair.buffer.statistics().waiting_selects == 1


async def test_what_a_lost_way_did_not_send_is_not_said_to_be_sent(
    two_gpus: FakeGpus,
) -> None:
    async with open_nccl_buffers(two_gpus) as pair:
        await pair.buffer.insert([1], None, noise(MIB), None, None)
        hearer, link, way = Hearer(), pair.peer._linked(), pair.way
        stream = link.open_stream(hearer, Select(has_key=False))
        offer, _ = await hearer.next()
        assert isinstance(offer, Offer)
        way.transport.abort()
        stream.send(Grant(offer.transfer, "nccl", "off"))
        assert await pair.peer.lookup.peek([1]) == 0  # and so the grant was heard
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
    two_gpus: FakeGpus,
) -> None:
    async with open_nccl_buffers(two_gpus) as pair:
        await pair.buffer.insert([1], None, noise(8), None, None)
        hearer, link = Hearer(), pair.peer._linked()
        stream = link.open_stream(hearer, Select(has_key=False))
        offer, _ = await hearer.next()
        assert isinstance(offer, Offer) and not offer.on_gpu
        stream.send(Grant(offer.transfer, "nccl", "off"))
        await until(lambda: not link.is_open)
        assert "nothing leads to" in str(link.error)
        assert await pair.buffer.peek([1]) == 1


async def test_a_server_that_has_left_moves_nothing_on_its_gpu(
    two_gpus: FakeGpus,
) -> None:
    async with open_nccl_buffers(two_gpus) as pair:
        way = pair.way
        await pair.server.aclose()
        assert way.transport.is_quiet and not pair.server._services
        assert (pair.ours.process.cuda, 0) not in workers._workers
