"""Everything that uses a link, ready to meet a hostile peer.

Each side yields what it waits for; all of that ends once the link is over.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Final, NamedTuple, TypeAlias

import torch

from asynckv.buffers.lookup import LookupBuffer
from asynckv.buffers.remote.lookup import RemoteLookupBuffer
from asynckv.buffers.remote.peer import Peer
from asynckv.buffers.serving.devices import DeviceService
from asynckv.buffers.serving.lookup import LookupService
from asynckv.buffers.serving.service import WaitingBytes
from asynckv.buffers.serving.store import StoreService
from asynckv.buffers.store import StoreBuffer
from asynckv.errors import ConfigError, PeerLost
from asynckv.links.link import Link, LinkStream
from asynckv.links.streams import StreamHandler
from asynckv.pipes.end import PipeEnd
from asynckv.pipes.pipe import Pipe
from asynckv.pipes.rendezvous import Follower, Leader
from asynckv.protocol.frames import JoinGroup, OpeningFrame, OpenPipe
from asynckv.protocol.values import PeerIdentity
from asynckv.types import TensorSpec
from harness.fuzzing.oracle import expect

__all__ = ("SIDES", "Side")

_BYTES: Final = 2**20
_LARGE: Final = 80_000
_TOKENS: Final = [1, 2, 3]
_Requests: TypeAlias = Sequence[Awaitable[object]]


class Side(NamedTuple):
    """One kind of user of a link; ``dials`` says which end of the link it has."""

    name: str
    dials: bool
    open: Callable[[Link], AbstractAsyncContextManager[_Requests]]


class _Buffers:
    """What a server of both buffers answers."""

    def __init__(self, link: Link, lookup: LookupBuffer, store: StoreBuffer) -> None:
        self.waiting = WaitingBytes(_BYTES)
        kept = self.waiting.for_link()
        devices = DeviceService(lookup, link, "edges", may_use_nccl=True)
        self.services = (
            LookupService(lookup, link, kept, devices),
            StoreService(store.values, link, kept),
            devices,
        )

    def open(
        self, stream: LinkStream, frame: OpeningFrame, body: bytes
    ) -> StreamHandler:
        for service in self.services:
            if (handler := service.open(stream, frame, body)) is not None:
                return handler
        raise ConfigError("nothing here answers that")


@asynccontextmanager
async def _serving(link: Link) -> AsyncIterator[_Requests]:
    tensor = torch.zeros(3)
    async with (
        LookupBuffer(_BYTES, drain_s=0) as lookup,
        StoreBuffer(_BYTES) as store,
    ):
        await lookup.insert(_TOKENS, None, tensor, None, None, entry_id="e")
        await lookup.insert(None, None, torch.zeros(_LARGE // 4), None, None)
        await store.put("key", tensor)
        buffers = _Buffers(link, lookup, store)
        link.start(buffers)
        yield ()
        for service in buffers.services:
            await service.wait_ended()
        told = lookup.statistics()
        left = (told.leased, told.waiting_selects, told.waiting_inserts)
        expect(left == (0, 0, 0) and not told.outside_bytes, "leases stay", told)
        expect(told.used_bytes <= told.max_bytes, "beyond its memory", told)
        kept = buffers.waiting.used_bytes
        expect(not kept, "what requests kept is not given back", kept)


class _Known(Peer):
    """A peer whose one link is given; it does not come back."""

    def __init__(self, link: Link) -> None:
        super().__init__(
            "mem://peer",
            own_identity=PeerIdentity("us", "1"),
            fingerprint=None,
            digest="full",
            lanes=1,
            reconnect_s=0,
            max_bytes=_BYTES,
        )
        self._links.use(link)


async def _streamed(lookup: RemoteLookupBuffer) -> None:
    specs = {"key": TensorSpec((2,), "float32"), "value": TensorSpec((_LARGE,), "int8")}
    async with lookup.open_insert(_TOKENS, None, specs) as writer:
        await writer.put("key", torch.zeros(2))
        await writer.put("value", torch.zeros(_LARGE, dtype=torch.int8))


async def _read(lookup: RemoteLookupBuffer) -> None:
    async with lookup.open_drop_select(_TOKENS, None) as stream:
        async for _ in stream:
            pass


async def _held(lookup: RemoteLookupBuffer) -> None:
    async with lookup.drop_select(_TOKENS):
        pass


@asynccontextmanager
async def _asking(link: Link) -> AsyncIterator[_Requests]:
    link.start(None)
    peer = _Known(link)
    large, small = torch.zeros(_LARGE), torch.zeros(3)
    into = {"key": torch.zeros(3)}
    try:
        yield (
            peer.lookup.drop_select(),
            peer.lookup.insert(_TOKENS, None, large, small, None),
            _held(peer.lookup),
            peer.lookup.drop_select(_TOKENS, into=into),
            peer.store.get("key"),
            peer.store.put("key", large),
            _streamed(peer.lookup),
            _read(peer.lookup),
            peer.lookup.peek(_TOKENS),
            peer.store.contains(["key"]),
        )
        used = peer.budget.used_bytes
        expect(not used, "the receive bound is not given back", used)
    finally:
        await peer.aclose()


async def _received(end: PipeEnd) -> None:
    async for _ in Pipe(end, end):
        pass


async def _sent(end: PipeEnd) -> None:
    pipe = Pipe(end, end)
    await pipe.send_tensor(None)
    await pipe.send_tensor(torch.zeros(3))
    await pipe.send_tensor(torch.zeros(_LARGE))
    await pipe.flush()


@asynccontextmanager
async def _dialled_pipe(link: Link) -> AsyncIterator[_Requests]:
    link.start(None)
    end = PipeEnd.dialled(link, _BYTES)
    try:
        yield (_received(end), _sent(end))
    finally:
        end.abort()


class _Listening:
    """Takes a pipe, and the other ranks of a group."""

    def __init__(self) -> None:
        self.ends: list[PipeEnd] = []
        self.leader = Leader(3, lambda error: None)
        self.changed = asyncio.Event()

    def open(
        self, stream: LinkStream, frame: OpeningFrame, body: bytes
    ) -> StreamHandler:
        if isinstance(frame, JoinGroup):
            return self.leader.seat(stream, frame)
        if not isinstance(frame, OpenPipe) or self.ends:
            raise ConfigError("nothing here answers that")
        end = PipeEnd.asked_for(stream, _BYTES)
        self.ends.append(end)
        self.changed.set()
        return end

    async def received(self) -> None:
        await self.changed.wait()
        if self.ends:
            self.ends[0].inbound.open()
            await _received(self.ends[0])


@asynccontextmanager
async def _listening(link: Link) -> AsyncIterator[_Requests]:
    listening = _Listening()
    link.call_when_lost(lambda error: listening.changed.set())
    link.start(listening)
    try:
        yield (listening.received(),)
    finally:
        listening.leader.end(PeerLost("over"))
        for end in listening.ends:
            end.abort()


@asynccontextmanager
async def _following(link: Link) -> AsyncIterator[_Requests]:
    link.start(None)
    follower = Follower(link, 1, 3, 1, lambda error: None)
    yield (follower.members(), follower.barrier.wait())


SIDES: Final = (
    Side("serving", False, _serving),
    Side("asking", True, _asking),
    Side("serving", False, _serving),
    Side("asking", True, _asking),
    Side("listening", False, _listening),
    Side("dialled", True, _dialled_pipe),
    Side("following", True, _following),
)
