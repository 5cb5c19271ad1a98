from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from asynckv.errors import ConfigError, IncompatiblePeer, PeerLost, RemoteProtocolError
from asynckv.links.link import LinkStream
from asynckv.protocol.failures import to_failure
from asynckv.protocol.frames import Frame, OpeningFrame, Ping
from asynckv.protocol.transfer_frames import (
    DeviceMet,
    DeviceReady,
    Devices,
    OpenDevices,
)
from asynckv.sharing.gpu_channel import MAX_UNHEARD, DeviceStream
from asynckv.testing.blocked import until
from asynckv.transports.nccl.transport import DeviceChannel
from harness.fake_gpus import FakeGpus
from harness.link_pairs import LinkPair, ScriptedService, linked
from harness.nccl_pairs import NcclPair


class Service(ScriptedService):
    """Opens the far transport for whoever asks."""

    def __init__(self, pair: NcclPair) -> None:
        super().__init__()
        self.pair = pair
        self.opening: asyncio.Task[None] | None = None

    def open(self, stream: LinkStream, frame: OpeningFrame, body: bytes) -> object:  # type: ignore[override]
        assert isinstance(frame, OpenDevices)
        channel = DeviceStream.answer(stream)
        channel.describe(self.pair.far.describe())
        opening = self.pair.far.open(frame.description, channel)
        self.opening = asyncio.create_task(opening)
        return channel


async def open_near(link: LinkPair, pair: NcclPair) -> None:
    channel = DeviceStream(answers=False)
    channel.ask(link.near, pair.near.describe())
    await pair.near.open(await channel.description(), channel)


@contextlib.asynccontextmanager
async def opened() -> AsyncIterator[tuple[NcclPair, LinkPair]]:
    pair = NcclPair(FakeGpus(2), lambda error: None, lambda error: None)
    async with linked(service=(service := Service(pair))) as link:
        try:
            await open_near(link, pair)
            assert service.opening is not None
            await service.opening
            yield pair, link
        finally:
            await pair.aclose()


async def test_payload_moves_by_what_is_said_on_a_link() -> None:
    async with opened() as (pair, _):
        content = bytes(range(256)) * 64
        source, target = pair.memory(0, content), pair.memory(1, bytes(2**14))
        landed = asyncio.Event()
        pair.far.receive(2, 0, target, lambda digest, error: landed.set())
        pair.near.send(2, 0, source, lambda digest, error: None)
        await landed.wait()
        assert pair.content(1, target) == content


async def test_a_lost_link_ends_the_transport() -> None:
    async with opened() as (pair, link):
        told: list[BaseException | None] = []
        target = pair.memory(0, bytes(4))
        pair.near.receive(1, 0, target, lambda _, error: told.append(error))
        link.near.abort()
        await until(lambda: bool(told))
        assert isinstance(told[0], PeerLost)


async def test_gpus_that_do_not_go_together_are_not_opened() -> None:
    pair = NcclPair(FakeGpus(2), lambda error: None, lambda error: None)
    pair.workers[0].nccl_version = 1
    pair.near._own = type(pair.near._own)("x", 1, b"", b"8 bytes!", 1)
    async with linked(service=Service(pair)) as link:
        with pytest.raises(IncompatiblePeer):
            await open_near(link, pair)
        service = link.service
        assert isinstance(service, Service) and service.opening is not None
        with pytest.raises(IncompatiblePeer):
            await service.opening
    await pair.aclose()


async def test_a_refusal_is_raised() -> None:
    def refuse(stream: LinkStream, frame: OpeningFrame, body: bytes) -> None:
        stream.send(to_failure(ConfigError("no GPU here")))

    pair = NcclPair(FakeGpus(2), lambda error: None, lambda error: None)
    async with linked(answer=refuse) as link:
        with pytest.raises(ConfigError, match="no GPU here"):
            await open_near(link, pair)
    await pair.aclose()


async def test_what_comes_too_soon_is_heard_later() -> None:
    heard: list[Frame] = []
    channel = DeviceStream(answers=True)
    channel.on_frame(DeviceReady(), b"")
    channel.attach(heard.append, lambda error: None)
    channel.on_frame(DeviceMet(1), b"")
    await until(lambda: len(heard) == 2)
    assert heard == [DeviceReady(), DeviceMet(1)]


async def test_too_much_that_nobody_hears_is_refused() -> None:
    channel = DeviceStream(answers=True)
    for _ in range(MAX_UNHEARD):
        channel.on_frame(DeviceReady(), b"")
    with pytest.raises(RemoteProtocolError, match="unheard"):
        channel.on_frame(DeviceReady(), b"")


async def test_what_comes_after_a_refusal_is_heard_by_nobody() -> None:
    heard: list[Frame] = []
    channel = DeviceStream(answers=False)
    channel.attach(heard.append, lambda error: None)
    channel.on_frame(to_failure(ConfigError("no")), b"")
    channel.on_frame(DeviceReady(), b"")
    await asyncio.sleep(0)
    assert not heard


async def test_who_is_detached_hears_nothing_more() -> None:
    heard: list[object] = []
    channel = DeviceStream(answers=True)
    channel.attach(heard.append, heard.append)
    channel.detach()
    channel.on_frame(DeviceReady(), b"")
    channel.on_lost(PeerLost("gone"))
    await asyncio.sleep(0)
    assert not heard


@pytest.mark.parametrize(
    ("frame", "body"),
    [(Ping(1), b""), (DeviceReady(), b"x"), (Devices(b""), b"")],
)
async def test_what_makes_no_sense_is_refused(frame: Frame, body: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        DeviceStream(answers=True).on_frame(frame, body)


async def test_it_is_a_channel() -> None:
    assert isinstance(DeviceStream(answers=False), DeviceChannel)
