"""Many hostile connections to one server, from a process of their own.

Started as ``python -m harness.crowd URL COUNT``. A line ``on`` lets
them come and ``off`` lets them go, in turn; each is answered once it is so, by
itself and how many were connected when it was read. Ends with its standard input.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Final, TypeAlias

from asynckv.errors import AsyncKVError
from asynckv.protocol.codec import encode_frame
from asynckv.protocol.frames import (
    PROTOCOL_MAJOR,
    Ack,
    Cancel,
    Get,
    Hello,
    Insert,
    Offer,
    Peek,
    Ping,
    Reached,
    Select,
)
from asynckv.protocol.values import Limits, PeerIdentity
from asynckv.protocol.wire import TYPE_CONTROL, pack_header
from asynckv.testing.faults.hostile import (
    HostilePeer,
    RawConnection,
    claim,
    open_hostile_peer,
)

__all__ = ("GREETED", "LARGE", "STRANGE", "Attendance", "besiege", "main")

_SLOW_S: Final = 1.0
_AGAIN_S: Final = 2.0
_LONG_S: Final = 60.0
_TOKENS: Final = (9, 9, 9)
_KEY: Final = b"".join(token.to_bytes(8, "little") for token in _TOKENS)

LARGE: Final = "large"
"""What of a store, if there is one, is asked for and never read."""

_numbers: Final = itertools.count()


async def _claim_everything(peer: HostilePeer) -> None:
    """2^60 bytes, at three places where a length is read."""
    await peer.send(1, Insert(_new_id(), 1, inline=False), claim(2**60))
    await peer.send(3, Insert(_new_id(), 2, inline=False, streaming=True), claim(2**40))
    await peer.control.send(pack_header(TYPE_CONTROL, 20, 2**60, 5) + bytes(1000))
    await peer.end()


async def _never_send(peer: HostilePeer) -> None:
    """Room is made for an entry whose bytes never come."""
    await peer.send(1, Insert(_new_id(), 1, inline=False), claim(2**20, tokens=_TOKENS))
    await peer.end()


async def _never_acknowledge(peer: HostilePeer) -> None:
    """It has an entry, says that it uses it, and says nothing more."""
    entry = claim(1000, tokens=_TOKENS) + bytes(1000)
    await peer.send(1, Insert(_new_id(), 1, inline=True), entry)
    await peer.send(3, Select(has_key=True), _KEY)
    offer = await peer.expect(Offer)
    await peer.send(3, Reached(offer.token))
    await peer.end()


async def _acknowledge_late(peer: HostilePeer) -> None:
    """It has an entry for a long time, and then says that it has used it."""
    entry = claim(1000, tokens=_TOKENS) + bytes(1000)
    await peer.send(1, Insert(_new_id(), 1, inline=True), entry)
    await peer.send(3, Select(has_key=True), _KEY)
    offer = await peer.expect(Offer)
    async with peer.alive():
        await asyncio.sleep(_SLOW_S)
        await peer.send(3, Ack(offer.token))
        await asyncio.sleep(_LONG_S)


async def _never_read(peer: HostilePeer) -> None:
    """It asks for much more than it takes: :data:`LARGE`, a thousand times."""
    for stream in range(1, 2001, 2):
        await peer.send(stream, Get(LARGE))
    await asyncio.sleep(_LONG_S)


async def _trickle(peer: HostilePeer) -> None:
    """A frame comes a byte a second."""
    async with peer.alive():
        for byte in encode_frame(1, Peek(has_key=True), _KEY)[0]:
            await peer.control.send(bytes([byte]))
            await asyncio.sleep(_SLOW_S)


async def _reuse_ids(peer: HostilePeer) -> None:
    """Two requests have one id."""
    await peer.send(1, Select(has_key=True), _KEY)
    await peer.send(1, Select(has_key=True), _KEY)
    await peer.end()


async def _talk_garbage(peer: HostilePeer) -> None:
    """Bytes that are no frame, on both kinds of connection."""
    await peer.lanes[0].send(os.urandom(100_000))
    await peer.control.send(os.urandom(100_000))
    await peer.end()


async def _flood_with_pings(peer: HostilePeer) -> None:
    """Pings as fast as they are read, and the answers are read too."""
    flood = b"".join(encode_frame(0, Ping(number))[0] for number in range(1000))
    async with _reading(peer):
        while True:
            await peer.control.send(flood)
            await asyncio.sleep(0)


async def _flood_with_requests(peer: HostilePeer, *, cancelled: bool) -> None:
    """Legal ones that cost nothing to make, or that wait and are taken back at once."""
    async with _reading(peer):
        for stream in itertools.count(1, 200):
            await peer.control.send(_requests(stream, cancelled=cancelled))
            await asyncio.sleep(0)


async def _flood_with_nothing(peer: HostilePeer) -> None:
    """Frames of a stream that is over, which nobody counts."""
    await peer.send(1, Peek(has_key=True), _KEY)
    flood = encode_frame(1, Cancel())[0] * 1000
    async with _reading(peer):
        while True:
            await peer.control.send(flood)
            await asyncio.sleep(0)


@functools.cache  # what a flood costs is to be the server's, not the crowd's
def _requests(first: int, *, cancelled: bool) -> bytes:
    frames: list[bytes] = []
    for stream in range(first, first + 200, 2):
        if cancelled:
            frames += encode_frame(stream, Select(has_key=True), bytes(8))
            frames += encode_frame(stream, Cancel())
        else:
            frames += encode_frame(stream, Peek(has_key=True), _KEY)
    return b"".join(frames)


@contextlib.asynccontextmanager
async def _reading(peer: HostilePeer) -> AsyncIterator[None]:
    """Take what comes, and look at none of it."""

    async def read() -> None:
        with contextlib.suppress(OSError):
            while await peer.control.receive_some():
                pass

    task = asyncio.create_task(read(), name="a hostile peer's ear")
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait({task})


async def _say_nothing(connection: RawConnection) -> None:
    await connection.receive_some()


async def _greet_slowly(connection: RawConnection) -> None:
    """The first frame comes so slowly that it never comes."""
    who = PeerIdentity(_new_id(), "1")
    hello = Hello(PROTOCOL_MAJOR, 0, who, Limits(), ("inline",), 1)
    for byte in encode_frame(0, hello)[0]:
        await connection.send(bytes([byte]))
        await asyncio.sleep(_SLOW_S)


async def _greet_with_garbage(connection: RawConnection) -> None:
    await connection.send(os.urandom(1000))
    while await connection.receive_some():
        pass


_Greeted: TypeAlias = Callable[[HostilePeer], Awaitable[None]]
_Way: TypeAlias = Callable[[str, "Attendance"], Awaitable[None]]
_Strange: TypeAlias = Callable[[RawConnection], Awaitable[None]]

GREETED: Final[tuple[_Greeted, ...]] = (
    _claim_everything,
    _never_send,
    _never_acknowledge,
    _never_read,
    _trickle,
    _reuse_ids,
    _talk_garbage,
    _acknowledge_late,
    _flood_with_pings,
    functools.partial(_flood_with_requests, cancelled=False),
    functools.partial(_flood_with_requests, cancelled=True),
    _flood_with_nothing,
)
"""What those do who were let in."""

STRANGE: Final[tuple[_Strange, ...]] = (
    _say_nothing,
    _greet_slowly,
    _greet_with_garbage,
)
"""What those do who were not."""


class Attendance:
    """Who is there: ``now`` so many, and ``arrivals`` is released by each of them."""

    def __init__(self) -> None:
        self.now = 0
        self.arrivals = asyncio.Semaphore(0)

    @contextlib.contextmanager
    def one(self) -> Iterator[None]:
        """One is there meanwhile."""
        self.now += 1
        self.arrivals.release()
        try:
            yield
        finally:
            self.now -= 1


async def besiege(url: str, count: int, there: Attendance) -> None:
    """Misbehave in every way at once until cancelled, over ``count`` connections.

    Who loses his connection comes again after two seconds.
    """
    ways: list[_Way] = [_as_peer(way) for way in GREETED]
    ways += [_as_stranger(way) for way in STRANGE]
    ways.append(_flood_with_connects)
    async with asyncio.TaskGroup() as crowd:
        for way in itertools.islice(itertools.cycle(ways), count):
            crowd.create_task(_misbehave(url, way, there), name="hostile")


async def _misbehave(url: str, way: _Way, there: Attendance) -> None:
    while True:
        with contextlib.suppress(OSError, AsyncKVError):
            await way(url, there)
        await asyncio.sleep(_AGAIN_S)


def _as_peer(way: _Greeted) -> _Way:
    async def misbehave(url: str, there: Attendance) -> None:
        async with open_hostile_peer(url, limits=Limits()) as peer:
            with there.one():
                await way(peer)

    return misbehave


def _as_stranger(way: _Strange) -> _Way:
    async def misbehave(url: str, there: Attendance) -> None:
        with await RawConnection.dial(url) as connection, there.one():
            await way(connection)

    return misbehave


async def _flood_with_connects(url: str, there: Attendance) -> None:
    """Whole greetings, one after the other, that lead to nothing."""
    with there.one():
        while True:
            async with open_hostile_peer(url, limits=Limits(), name=_new_id()):
                pass


def _new_id() -> str:
    return f"hostile-{os.getpid()}-{next(_numbers)}"


async def _obey(url: str, count: int) -> None:
    loop = asyncio.get_running_loop()
    while (await loop.run_in_executor(None, sys.stdin.readline)).strip():
        there = Attendance()
        siege = asyncio.create_task(besiege(url, count, there))
        for _ in range(count):
            await there.arrivals.acquire()
        _answer("on", there.now)
        await loop.run_in_executor(None, sys.stdin.readline)
        last = there.now
        siege.cancel()
        await asyncio.wait({siege})
        _answer("off", last)


def _answer(word: str, connected: int) -> None:
    sys.stdout.write(f"{word} {connected}\n")
    sys.stdout.flush()


def main() -> None:
    """Do what standard input says, at the server that the command line names."""
    os.nice(10)  # on a machine of their own they would take no time of the server
    asyncio.run(_obey(sys.argv[1], int(sys.argv[2])))


if __name__ == "__main__":
    main()
