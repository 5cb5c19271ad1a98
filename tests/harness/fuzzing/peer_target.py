"""A whole side of a link against a peer that says anything, in any order.

Whoever serves or asks: each request ends by an answer or a documented error, no
fault of ours is logged, and nothing of the peer is left once its link is gone.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Final, NamedTuple, TypeAlias

import torch

from asynckv.buffers.lookup import LookupBuffer
from asynckv.buffers.remote.lookup import RemoteLookupBuffer
from asynckv.buffers.remote.peer import Peer
from asynckv.buffers.serving.devices import DeviceService
from asynckv.buffers.serving.lookup import LookupService
from asynckv.buffers.serving.service import WaitingBytes
from asynckv.buffers.serving.store import StoreService
from asynckv.buffers.store import StoreBuffer
from asynckv.errors import AsyncKVError, ConfigError, PeerLost
from asynckv.links.link import Link, LinkStream
from asynckv.links.streams import ControlStream, StreamHandler, StreamOwner
from asynckv.pipes.end import PipeEnd
from asynckv.pipes.pipe import Pipe
from asynckv.pipes.rendezvous import Follower, Leader
from asynckv.protocol.frames import JoinGroup, OpeningFrame, OpenPipe
from asynckv.protocol.handshake import Agreement
from asynckv.protocol.values import Limits, PeerIdentity
from asynckv.transports.mem import MemTransport
from asynckv.types import TensorSpec
from harness.fuzzing.corpus import Corpus, Target, expect, pieces_of
from harness.fuzzing.mutations import change_items, join

__all__ = (
    "END_S",
    "MEETING_S",
    "PEER",
    "SIDES",
    "Side",
)


_LIMITS: Final = Limits(
    max_body_bytes=2**17, max_streams=64, max_receive_bytes=2**20, heartbeat_ms=60_000
)
_AGREEMENT: Final = Agreement(
    peer=PeerIdentity("peer", "1"),
    limits=_LIMITS,
    peer_limits=_LIMITS,
    fingerprint=None,
    payload_path="mem",
    payload_description=b"",
    lanes=1,
    digest="full",
)
_TICKS: Final = 4
END_S: Final = 5.0
"""What has not ended so long after its link hangs."""
MEETING_S: Final = 3 * END_S


def _make(rng: random.Random, corpus: Corpus) -> bytes:
    choice = rng.getrandbits(8)
    opener = 2 if SIDES[choice % len(SIDES)].dials else 1
    items = corpus.conversation(rng) if rng.random() < 0.4 else []
    for _ in range(0 if items else rng.choice((1, 2, 4))):
        items += corpus.pick(rng, opener=opener)
        opener += 2
    for _ in range(rng.choice((0, 1, 1, 2))):
        if items:
            change_items(items, rng)
    return bytes((choice,)) + join(items)


def _check(data: bytes) -> None:
    faults = _Faults()
    logger = logging.getLogger("asynckv")
    logger.addHandler(faults)
    try:
        asyncio.run(_meet_in_time(data, faults))
    finally:
        logger.removeHandler(faults)
    expect(not faults.told, "a fault of ours", *faults.told)


async def _meet_in_time(data: bytes, faults: _Faults) -> None:
    meeting = asyncio.create_task(_meet(data, faults))
    _, hanging = await asyncio.wait({meeting}, timeout=MEETING_S)
    where = [_where(task) for task in asyncio.all_tasks() if hanging]
    meeting.cancel()
    await asyncio.wait({meeting}, timeout=END_S)
    expect(not hanging, "something does not end", *where)
    meeting.result()
    await _nothing_is_left()


async def _meet(data: bytes, faults: _Faults) -> None:
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(faults.on_exception)
    side = SIDES[data[0] % len(SIDES)] if data else SIDES[0]
    stream = _Deaf()
    link = Link(stream, _AGREEMENT, dialled=side.dials)
    far = MemTransport(1, True, loop, lambda error: None)
    await link.payload.open(b"", far)
    await far.open(b"", link.payload)
    async with side.open(link) as requests:
        tasks = [loop.create_task(_settled(request)) for request in requests]
        await _ticks()
        for piece in pieces_of(data[1:]):
            stream.hear(piece)
            await _ticks()
        link.abort()
        far.abort()
        await _ticks()
        if tasks:
            _, hanging = await asyncio.wait(tasks, timeout=END_S)
            where = map(_where, hanging)
            expect(not hanging, "hangs on a link that is over", *where)


async def _settled(request: Awaitable[Any]) -> None:
    """Wait for a request; what it may end by is in its documentation."""
    try:
        await request
    except (AsyncKVError, KeyError, ValueError, TimeoutError):
        pass


def _where(task: asyncio.Task[Any]) -> str:
    """Return where it waits, from the outermost coroutine to the innermost."""
    places: list[str] = []
    coroutine: Any = task.get_coro()
    while coroutine is not None:
        frame = getattr(coroutine, "cr_frame", None)
        if frame is not None:
            places.append(f"{frame.f_code.co_qualname}:{frame.f_lineno}")
        coroutine = getattr(coroutine, "cr_await", None)
    return " > ".join(places)


async def _ticks() -> None:
    for _ in range(_TICKS):
        await asyncio.sleep(0)


async def _nothing_is_left() -> None:
    left = asyncio.all_tasks() - {asyncio.current_task()}
    if left:
        _, left = await asyncio.wait(left, timeout=END_S)
    expect(not left, "tasks that stay", *left)


class _Faults(logging.Handler):
    """Hears of what asynckv itself takes for a fault of its own."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.told: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        self.told.append(f"{record.getMessage()}: {error!r} {_place_of(error)}")

    def on_exception(
        self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]
    ) -> None:
        error = context.get("exception")
        self.told.append(f"{context['message']}: {error!r} {_place_of(error)}")


def _place_of(error: BaseException | None) -> str:
    traceback = None if error is None else error.__traceback__
    place = ""
    while traceback is not None:
        code = traceback.tb_frame.f_code
        place = f"{code.co_filename}:{traceback.tb_lineno} {code.co_name}"
        traceback = traceback.tb_next
    return place


class _Deaf(ControlStream):
    """A connection to a peer that listens to nothing: what it says is fed by hand."""

    def __init__(self) -> None:
        self._owner: StreamOwner | None = None

    def hear(self, data: bytes) -> None:
        if self._owner is not None:
            self._owner.on_bytes(data)

    def start(self, owner: StreamOwner) -> None:
        self._owner = owner

    def write(self, data: bytes) -> None:
        self.sent_bytes += len(data)

    def finish(self) -> None:
        pass

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass

    def abort(self) -> None:
        self._owner = None


PEER: Final = Target("peer", _make, _check)


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
