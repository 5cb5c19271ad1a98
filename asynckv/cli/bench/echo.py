"""The baseline of small things: a bare asyncio echo.

What a program of its own would do at the least: an ``asyncio.Protocol`` on each side, a
length before each message, one msgspec frame with the bytes in it, and one future for
the answer. It runs on the very loops that asynckv runs on, in turns with it.
"""

from __future__ import annotations

import asyncio
import socket
from typing import Final, Self, cast

import msgspec

__all__ = ("EchoConnection", "answer_echoes")

_LENGTH_NBYTES: Final = 4
_MAX_NBYTES: Final = 64 * 1024


class _Message(msgspec.Struct, frozen=True):
    number: int
    body: bytes


_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(_Message).decode


class _Messages(asyncio.Protocol):
    """Cuts what comes into messages. ``over`` is done when the connection is."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.over: asyncio.Future[None] = self._loop.create_future()
        self._transport: asyncio.Transport | None = None
        self._pending = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Not asked by isinstance(): that of uvloop is none.
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.over.done():
            self.over.set_result(None)

    def data_received(self, data: bytes) -> None:
        data = self._pending + data if self._pending else data
        start = 0
        while len(data) - start >= _LENGTH_NBYTES:
            body = start + _LENGTH_NBYTES
            end = body + int.from_bytes(data[start:body], "big")
            if end - body > _MAX_NBYTES:
                self.close()
                return
            if end > len(data):
                break
            self.received(data[body:end])
            start = end
        self._pending = data[start:]

    def received(self, message: bytes) -> None:
        """Send a message back."""
        try:
            asked = _decode(message)
        except msgspec.MsgspecError:
            self.close()  # it says what no bench says
            return
        self.send(_encode(_Message(asked.number, asked.body)))

    def send(self, message: bytes) -> None:
        """Send one message."""
        if self._transport is not None:
            length = len(message).to_bytes(_LENGTH_NBYTES, "big")
            self._transport.write(length + message)

    def close(self) -> None:
        """Hang up. Never waits."""
        if self._transport is not None:
            self._transport.abort()


async def answer_echoes(connection: socket.socket) -> None:
    """Send back what comes, until the peer hangs up. Cancelling it hangs up."""
    loop = asyncio.get_running_loop()
    _, messages = await loop.create_connection(_Messages, sock=connection)
    try:
        await messages.over
    finally:
        messages.close()


class EchoConnection(_Messages):
    """The measuring side: one message at a time. Made by :meth:`open`."""

    def __init__(self) -> None:
        super().__init__()
        self._number = 0
        self._answer: asyncio.Future[_Message] | None = None

    @classmethod
    async def open(cls, connection: socket.socket) -> Self:
        """Go on with a connection of that kind."""
        loop = asyncio.get_running_loop()
        return (await loop.create_connection(cls, sock=connection))[1]

    def received(self, message: bytes) -> None:
        answer, self._answer = self._answer, None
        if answer is not None and not answer.done():
            answer.set_result(_decode(message))

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        answer, self._answer = self._answer, None
        if answer is not None and not answer.done():
            answer.set_exception(exc or ConnectionError("the bare echo hung up"))

    async def ping(self, body: bytes) -> bytes:
        """Send some bytes there and back.

        :raises ConnectionError: the other side hung up
        """
        if self.over.done():
            raise ConnectionError("the bare echo has hung up")
        self._number += 1
        self._answer = self._loop.create_future()
        self.send(_encode(_Message(self._number, body)))
        return (await self._answer).body
