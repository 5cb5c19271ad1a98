"""A peer that keeps to no rule: it says any frame, any bytes, or nothing.

It knows how to greet, and then does only what it is told, over plain sockets. What
it sends is never checked.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
from collections.abc import AsyncIterator, Sequence
from types import TracebackType
from typing import Final, Self, TypeVar

import msgspec

from asynckv.errors import RemoteProtocolError
from asynckv.links.sockets import wait_readable
from asynckv.protocol.codec import FrameDecoder, encode_frame
from asynckv.protocol.frames import (
    PROTOCOL_MAJOR,
    PROTOCOL_MINOR,
    Attach,
    Attached,
    Frame,
    Hello,
    Ping,
    Pong,
    Refuse,
    Welcome,
)
from asynckv.protocol.values import Limits, PeerIdentity
from asynckv.protocol.wire import encode_chunk_header
from asynckv.testing.faults.places import place_of, prepared
from asynckv.testing.faults.proxy import close_with_reset
from asynckv.transfers.manifest import layout_of, pack
from asynckv.transfers.tokens import as_tokens
from asynckv.types import TensorSpec

__all__ = (
    "QUICK",
    "HostilePeer",
    "RawConnection",
    "RawListener",
    "accept_hostile_peer",
    "claim",
    "open_hostile_peer",
    "spec_of",
)


class RawConnection:
    """One connected stream socket. Closed by ``with``."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = prepared(sock)
        self._loop = asyncio.get_running_loop()
        self._sending = asyncio.Lock()

    @classmethod
    async def dial(cls, url: str) -> Self:
        """Connect to the listener at ``url``, and say nothing.

        :raises OSError: nobody listens there
        """
        return cls(await place_of(url).connect())

    async def send(self, data: bytes) -> None:
        """Send all of ``data``, with nothing of others in between.

        :raises OSError: the connection has ended
        """
        async with self._sending:
            await self._loop.sock_sendall(self._sock, data)

    def send_nowait(self, data: bytes) -> int:
        """Send what the kernel takes now; return how many bytes that is.

        :raises OSError: the connection has ended
        """
        try:
            return self._sock.send(data)
        except BlockingIOError:
            return 0

    async def receive(self, nbytes: int) -> bytes:
        """Return ``nbytes``, or what came before the end of the stream.

        :raises OSError: the connection was reset
        """
        data = bytearray()
        while len(data) < nbytes:
            piece = await self._loop.sock_recv(self._sock, nbytes - len(data))
            if not piece:
                break
            data += piece
        return bytes(data)

    async def receive_some(self, max_bytes: int = 2**16) -> bytes:
        """Return what is there, at least a byte; nothing at the end of the stream.

        :raises OSError: the connection was reset
        """
        return await self._loop.sock_recv(self._sock, max_bytes)

    def finish(self) -> None:
        """End the sending half."""
        self._sock.shutdown(socket.SHUT_WR)

    def close(self, *, resets: bool = False) -> None:
        """Hang up, or with ``resets`` break off (RST)."""
        if resets:
            close_with_reset(self._sock)
        else:
            self._sock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class RawListener:
    """Listens at ``url``, a free loopback port, and answers nothing by itself.

    Closed by ``with``, and with it every connection that it has accepted.
    """

    def __init__(self, *, backlog: int = 16) -> None:
        self._sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._sock.setblocking(False)
        self._sock.bind(("127.0.0.1", 0))
        self._sock.listen(backlog)
        self.url = "tcp://{}:{}".format(*self._sock.getsockname())
        self._accepted: list[RawConnection] = []

    async def accept(self) -> RawConnection:
        """Return the next connection. A cancelled call has accepted none."""
        while True:
            await wait_readable(self._sock)
            with contextlib.suppress(BlockingIOError):  # who dialled is gone again
                sock, _ = self._sock.accept()
                self._accepted.append(RawConnection(sock))
                return self._accepted[-1]

    def close(self) -> None:
        """Hang up everywhere."""
        self._sock.close()
        for connection in self._accepted:
            connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


_F = TypeVar("_F", bound=Frame)

QUICK: Final = Limits(heartbeat_ms=100)
"""Limits by which a peer that is silent is dead after 0.3 s."""

_numbers: Final = itertools.count(1)


def claim(*shape: int, tokens: Sequence[int] = (1, 2, 3)) -> bytes:
    """Return the body of an insert, or an offer, of bytes of any ``shape`` at all."""
    layout = layout_of({"key": spec_of(*shape)})
    return pack(layout, [b""], as_tokens(tokens), None)


def spec_of(*shape: int) -> TensorSpec:
    """Return the spec of a tensor of bytes that may well be impossible."""
    spec = TensorSpec((1,), "uint8")
    msgspec.structs.force_setattr(spec, "shape", shape)
    return spec


class HostilePeer:
    """One link, opened by :func:`open_hostile_peer`.

    It reads only in :meth:`receive` and what is built on it; there it answers
    pings, so that it is alive as long as it reads.
    """

    def __init__(self, control: RawConnection, lanes: list[RawConnection]) -> None:
        self.control = control
        self.lanes = lanes
        self._frames = _FrameReader(control)

    async def send(self, stream: int, frame: Frame, body: bytes = b"") -> None:
        """Send one frame, right or wrong.

        :raises OSError: the link was closed
        """
        await self.control.send(b"".join(encode_frame(stream, frame, body)))

    async def send_chunk(
        self, transfer: int, data: bytes, *, lane: int = 0, part: int = 0, at: int = 0
    ) -> None:
        """Send bytes of a tensor.

        :raises OSError: the lane was closed
        """
        header = encode_chunk_header(transfer, part, at, len(data))
        await self.lanes[lane].send(header + data)

    async def receive(self) -> tuple[int, Frame, bytes]:
        """Return the next stream, frame and body that is no heartbeat.

        :raises ConnectionError: the link was closed; the message is its last word
        """
        while True:
            stream, frame, body = await self._frames.next()
            if isinstance(frame, Ping):
                await self.send(0, Pong(frame.nonce))
            elif isinstance(frame, Refuse):
                raise ConnectionRefusedError(f"{frame.code}: {frame.message}")
            elif not isinstance(frame, Pong):
                return stream, frame, body

    async def expect(self, kind: type[_F]) -> _F:
        """Read until a frame of ``kind`` comes, and return it.

        :raises ConnectionError: the link was closed
        """
        while True:
            _, frame, _ = await self.receive()
            if isinstance(frame, kind):
                return frame

    async def end(self) -> str:
        """Read until the link is closed, and return the last word of the other side.

        Empty, if it had none.
        """
        try:
            while True:
                await self.receive()
        except ConnectionRefusedError as exc:
            return str(exc)
        except OSError:
            return ""

    @contextlib.asynccontextmanager
    async def alive(self) -> AsyncIterator[None]:
        """Read, drop what comes, and answer pings, while entered."""
        reading = asyncio.create_task(self.end(), name="a hostile peer's heart")
        try:
            yield
        finally:
            reading.cancel()
            await asyncio.wait({reading})


@contextlib.asynccontextmanager
async def open_hostile_peer(
    url: str, *, limits: Limits = QUICK, lanes: int = 1, name: str | None = None
) -> AsyncIterator[HostilePeer]:
    """Open a link to the listener at ``url``, as a peer that is to be trusted.

    :raises RemoteProtocolError: the listener did not let it in
    """
    major, minor = PROTOCOL_MAJOR, PROTOCOL_MINOR
    hello = Hello(major, minor, _identity(name), limits, ("inline",), lanes)
    with contextlib.ExitStack() as stack:
        control = stack.enter_context(await RawConnection.dial(url))
        welcome = await _greet(control, hello, Welcome)
        attached = []
        for lane in range(welcome.lanes):
            attached.append(stack.enter_context(await RawConnection.dial(url)))
            await _greet(attached[-1], Attach(welcome.link_token, lane), Attached)
        yield HostilePeer(control, attached)


async def accept_hostile_peer(
    listener: RawListener, *, limits: Limits = QUICK, name: str | None = None
) -> HostilePeer:
    """Welcome the next link of whoever dials ``listener``, which owns its sockets.

    :raises RemoteProtocolError: who came is no peer
    """
    control = await listener.accept()
    hello = await _first(control, Hello)
    major, minor = PROTOCOL_MAJOR, PROTOCOL_MINOR
    welcome = Welcome(
        major, minor, _identity(name), limits, "inline", hello.lanes, b"token"
    )
    await control.send(encode_frame(0, welcome)[0])
    lanes = []
    for _ in range(hello.lanes):
        lanes.append(await listener.accept())
        await _first(lanes[-1], Attach)
        await lanes[-1].send(encode_frame(0, Attached())[0])
    return HostilePeer(control, lanes)


def _identity(name: str | None) -> PeerIdentity:
    return PeerIdentity(name or f"hostile-{next(_numbers)}", "1")


async def _greet(connection: RawConnection, greeting: Frame, answer: type[_F]) -> _F:
    await connection.send(encode_frame(0, greeting)[0])
    return await _first(connection, answer)


async def _first(connection: RawConnection, kind: type[_F]) -> _F:
    _, frame, _ = await _FrameReader(connection).next()
    if not isinstance(frame, kind):
        raise RemoteProtocolError(f"{frame!r:.200} instead of a {kind.__name__}")
    return frame


class _FrameReader:
    """Frames of one connection, one after the other; not a byte beyond the last."""

    def __init__(self, connection: RawConnection) -> None:
        self._connection = connection
        self._decoder = FrameDecoder()

    async def next(self) -> tuple[int, Frame, bytes]:
        """Return the next frame.

        :raises ConnectionError: the connection has ended
        """
        while True:
            data = await self._connection.receive_some(self._decoder.missing_bytes)
            if not data:
                raise ConnectionResetError("the other side hung up")
            for whole in self._decoder.feed(data):
                return whole
