"""A whole side of a link against a peer that says anything, in any order.

Whoever serves or asks: each request ends by an answer or a documented error, no
fault of ours is logged, and nothing of the peer is left once its link is gone.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable
from typing import Any, Final

from asynckv.errors import AsyncKVError
from asynckv.links.link import Link
from asynckv.links.streams import ControlStream, StreamOwner
from asynckv.protocol.handshake import Agreement
from asynckv.protocol.values import Limits, PeerIdentity
from asynckv.transports.mem import MemTransport
from harness.fuzzing.corpus import Corpus
from harness.fuzzing.mutations import change_items, join
from harness.fuzzing.oracle import Target, expect, pieces_of
from harness.fuzzing.sides import SIDES

__all__ = ("END_S", "PEER")

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
    _, hanging = await asyncio.wait({meeting}, timeout=3 * END_S)
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
