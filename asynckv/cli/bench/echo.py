"""The baseline of small things: a bare asyncio echo.

What a program of its own would do at the least: an ``asyncio.Protocol`` on each side, a
length before each message, one msgspec frame with the bytes in it, and one future for
the answer. It runs on the very loops that asynckv runs on, in turns with it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hmac
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, Self, cast

import msgspec

from asynckv.cli.bench.baselines import TOKEN_NBYTES

__all__ = ("ECHO", "ECHOES", "EchoConnection", "EchoServer", "Turns", "in_turns")

ECHO: Final = "bare asyncio echo"
ECHOES: Final = "two bare asyncio echoes"

_LENGTH_NBYTES: Final = 4
_MAX_NBYTES: Final = 64 * 1024
_TOKEN_TIMEOUT_S: Final = 5.0
_TURN: Final = 10


class _Message(msgspec.Struct, frozen=True):
    number: int
    body: bytes


_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(_Message).decode


class _Messages(asyncio.Protocol):
    """Cuts what comes into messages."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._pending = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Not asked by isinstance(): that of uvloop is none.
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        data = self._pending + data if self._pending else data
        start = 0
        while len(data) - start >= _LENGTH_NBYTES:
            body = start + _LENGTH_NBYTES
            end = body + int.from_bytes(data[start:body], "big")
            if end - body > _MAX_NBYTES:
                self.hang_up()
                return
            if end > len(data):
                break
            self.received(data[body:end])
            start = end
        self._pending = data[start:]

    def received(self, message: bytes) -> None:
        """A message is whole."""

    def send(self, message: bytes) -> None:
        """Send one message."""
        if self._transport is not None:
            length = len(message).to_bytes(_LENGTH_NBYTES, "big")
            self._transport.write(length + message)

    def hang_up(self) -> None:
        """Close now. Never waits."""
        if self._transport is not None:
            self._transport.abort()


class _Answering(_Messages):
    """Sends back what comes, once the token has come."""

    def __init__(self, server: EchoServer) -> None:
        super().__init__()
        self._server = server
        self._timer: asyncio.TimerHandle | None = None
        self._is_invited = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._server.connections.add(self)
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(_TOKEN_TIMEOUT_S, self.hang_up)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._server.connections.discard(self)

    def received(self, message: bytes) -> None:
        if not self._is_invited:
            self._invite(message)
            return
        try:
            asked = _decode(message)
        except msgspec.MsgspecError:
            self.hang_up()  # it says what no bench says
            return
        self.send(_encode(_Message(asked.number, asked.body)))

    def _invite(self, token: bytes) -> None:
        self._stop_timer()
        self._is_invited = hmac.compare_digest(token, self._server.token)
        if not self._is_invited:
            self.hang_up()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class EchoServer:
    """Sends back what comes. Used as a context manager."""

    def __init__(self, host: str, token: bytes) -> None:
        self.token = token
        self.connections: set[_Answering] = set()
        self._host = host
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> int:
        """Return the port."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _Answering(self), self._host, 0)
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def __aexit__(self, *_: object) -> None:
        if self._server is not None:
            self._server.close()
        for connection in list(self.connections):
            connection.hang_up()


class EchoConnection(_Messages):
    """The measuring side: one message at a time. Made by :meth:`open`."""

    def __init__(self) -> None:
        super().__init__()
        self._number = 0
        self._loop = asyncio.get_running_loop()
        self._answer: asyncio.Future[_Message] | None = None

    @classmethod
    async def open(cls, host: str, port: int, token: bytes) -> Self:
        """Connect.

        :raises OSError: nothing listens there
        :raises ValueError: the token has not the length of one
        """
        if len(token) != TOKEN_NBYTES:
            raise ValueError(f"a token of {len(token)} bytes")
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(cls, host, port)
        connection.send(token)
        return connection

    def received(self, message: bytes) -> None:
        answer, self._answer = self._answer, None
        if answer is not None and not answer.done():
            answer.set_result(_decode(message))

    def connection_lost(self, exc: Exception | None) -> None:
        answer, self._answer = self._answer, None
        if answer is not None and not answer.done():
            answer.set_exception(exc or ConnectionError("the bare echo hung up"))

    async def ping(self, body: bytes) -> bytes:
        """Send some bytes there and back.

        :raises ConnectionError: the other side hung up
        """
        self._number += 1
        self._answer = self._loop.create_future()
        self.send(_encode(_Message(self._number, body)))
        return (await self._answer).body

    def close(self) -> None:
        """Hang up. Never waits."""
        self.hang_up()


@dataclasses.dataclass(frozen=True)
class Turns:
    """The seconds of single calls. ``before`` and ``after`` are the baseline's turns,
    every other one of them.
    """

    ours: Sequence[float]
    before: Sequence[float]
    after: Sequence[float]


async def in_turns(
    calls: int,
    ours: Callable[[], Awaitable[object]],
    bare: Callable[[], Awaitable[object]],
) -> Turns:
    """Make so many calls, ten of the baseline before each ten and after the last ones.

    At least one call.

    Both find the processor, awake or not, and its caches as the other leaves them.
    """
    turn, found, beside = 0, list[float](), (list[float](), list[float]())
    for turn, start in enumerate(range(0, calls, _TURN)):
        await _timed(_TURN, bare, beside[turn % 2])
        await _timed(min(_TURN, calls - start), ours, found)
    await _timed(_TURN, bare, beside[(turn + 1) % 2])
    return Turns(found, *beside)


async def _timed(
    count: int, call: Callable[[], Awaitable[object]], taken: list[float]
) -> None:
    for _ in range(count):
        began_s = time.perf_counter()
        await call()
        taken.append(time.perf_counter() - began_s)
