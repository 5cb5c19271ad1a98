"""Two ends of a link in one process, and fakes for who asks and who answers."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, Final, Literal, TypeAlias, TypeVar

import pytest

from asynckv.errors import PeerLost
from asynckv.links.dial import dial
from asynckv.links.link import Link, LinkStream
from asynckv.links.listen import LinkListener, listen
from asynckv.protocol.frames import Frame, OpeningFrame, Peek, Result
from asynckv.protocol.values import PeerIdentity
from asynckv.transports.lane_sockets import LaneSocket

__all__ = (
    "ASK",
    "Answer",
    "Hearer",
    "LinkPair",
    "ScriptedService",
    "ask",
    "dialled",
    "held_lanes",
    "landed_bytes",
    "linked",
    "name_of",
)

Answer: TypeAlias = Callable[[LinkStream, OpeningFrame, bytes], None]

ASK: Final = Peek(has_key=True)
"""A request that any service may answer."""

_F = TypeVar("_F")

_numbers: Final = itertools.count(1)


def name_of(role: str) -> PeerIdentity:
    """Return an identity that no other peer of this process has."""
    return PeerIdentity(f"{role}-{next(_numbers)}", "1")


@contextlib.asynccontextmanager
async def dialled(url: str, role: str = "peer") -> AsyncIterator[Link]:
    """Dial as a new peer of that role; leaving closes the link."""
    link = await dial(url, identity=name_of(role))
    try:
        yield link
    finally:
        await link.aclose()


class Hearer:
    """Hears of one stream: keeps what came, and can be waited for."""

    def __init__(self) -> None:
        self.frames: list[tuple[Frame, bytes]] = []
        self.losses: list[PeerLost] = []
        self._taken = 0
        self._changed = asyncio.Event()

    def on_frame(self, frame: Frame, body: bytes) -> None:
        self.frames.append((frame, body))
        self._changed.set()

    def on_lost(self, error: PeerLost) -> None:
        self.losses.append(error)
        self._changed.set()

    async def next(self) -> tuple[Frame, bytes]:
        """Wait for the next frame that was not returned before.

        :raises PeerLost: the link ended first
        """
        while len(self.frames) == self._taken:
            if self.losses:
                raise self.losses[0]
            self._changed.clear()
            await self._changed.wait()
        self._taken += 1
        return self.frames[self._taken - 1]

    async def next_of(self, kind: type[_F]) -> tuple[_F, bytes]:
        """As :meth:`next`, which is of that kind.

        :raises AssertionError: it is another frame
        """
        frame, body = await self.next()
        if not isinstance(frame, kind):
            raise AssertionError(f"no {kind.__name__} came, but {frame}")
        return frame, body

    async def loss(self) -> PeerLost:
        """Wait for the end of the link."""
        while not self.losses:
            self._changed.clear()
            await self._changed.wait()
        return self.losses[0]


async def ask(link: Link, body: bytes = b"") -> tuple[Frame, bytes]:
    """Ask the other end; return the first that it answers."""
    hearer = Hearer()
    link.open_stream(hearer, ASK, body)
    return await hearer.next()


def _echo(stream: LinkStream, frame: OpeningFrame, body: bytes) -> None:
    stream.send(Result(len(body)), body)


class ScriptedService:
    """Answers as it is told, and keeps what was asked. Echoes unless told."""

    def __init__(self, answer: Answer = _echo) -> None:
        self.answer = answer
        self.asked: list[tuple[LinkStream, OpeningFrame, bytes]] = []
        self.hearers: list[Hearer] = []

    def open(self, stream: LinkStream, frame: OpeningFrame, body: bytes) -> Hearer:
        self.asked.append((stream, frame, body))
        self.hearers.append(Hearer())
        self.answer(stream, frame, body)
        return self.hearers[-1]


@contextlib.contextmanager
def held_lanes(call: Literal["send", "receive"]) -> Iterator[threading.Event]:
    """Let no lane move payload before this ends; the event says that one is to."""
    are_held, may_go_on = threading.Event(), threading.Event()
    move = getattr(LaneSocket, call)

    def hold(lane: LaneSocket, *pieces: Any, **of_header: Any) -> Any:
        if not of_header:
            are_held.set()
            may_go_on.wait(60)
        return move(lane, *pieces, **of_header)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LaneSocket, call, hold)
        try:
            yield are_held
        finally:
            may_go_on.set()


def landed_bytes(link: Link) -> int:
    """Return what has landed of parts of a link's first payloads that are not whole."""
    return sum(link.payload.landed_bytes(number) for number in range(1, 30))


@dataclasses.dataclass(frozen=True)
class LinkPair:
    """``near`` dialled, ``far`` was accepted; ``service`` answers ``near``."""

    near: Link
    far: Link
    service: ScriptedService
    listener: LinkListener


@contextlib.asynccontextmanager
async def linked(
    url: str = "tcp://127.0.0.1:0",
    answer: Answer = _echo,
    *,
    near: dict[str, Any] | None = None,
    far: dict[str, Any] | None = None,
    service: ScriptedService | None = None,
) -> AsyncIterator[LinkPair]:
    """Open a link through ``url``; ``near`` and ``far`` are options of the sides.

    ``service`` answers instead of one that does as ``answer`` says.
    """
    service = service or ScriptedService(answer)
    arrived: asyncio.Future[Link] = asyncio.get_running_loop().create_future()
    listener = await listen(
        url,
        identity=name_of("far"),
        service_for=lambda link: service,
        on_link=arrived.set_result,
        **(far or {}),
    )
    try:
        link = await dial(listener.url, identity=name_of("near"), **(near or {}))
        try:
            yield LinkPair(link, await arrived, service, listener)
        finally:
            await link.aclose()
    finally:
        await listener.aclose()
