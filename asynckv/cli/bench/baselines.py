"""The baselines of a bench, both sides: what programs of their own would do.

Raw sockets, one or several, with a thread for each: they block, and are called in
threads. Bare asyncio streams, which send small orders out and constant bytes back, in
order. And a bare asyncio echo: an ``asyncio.Protocol`` on each side, a length before
each message, one msgspec frame with the bytes in it, and one future for the answer; it
runs on the very loops that asynckv runs on. None does any of asynckv's work.

The serving side has one port for all of them, which a :class:`Meeting` in its store
names: there only those read it that the link has let in. Its token opens a connection.
Who does not bring it is hung up on; who does gets constant bytes, its own, and the
process's CPU seconds, within fixed bounds of memory.
"""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import contextlib
import dataclasses
import enum
import hmac
import itertools
import secrets
import socket
import struct
import time
from collections.abc import AsyncIterator, Sequence
from typing import Final, Self, cast

import msgspec
import numpy
import torch

from asynckv.protocol.handshake import MAX_LANES
from asynckv.waits.waiting import OwnTasks

__all__ = (
    "MAX_NBYTES",
    "MAX_PARTS",
    "MEETING_KEY",
    "BaselineServer",
    "Baselines",
    "EchoConnection",
    "Kind",
    "Meeting",
    "RawStreams",
    "StreamsConnection",
    "What",
    "answer_echoes",
    "connect_to",
    "meeting_as_tensor",
    "meeting_from",
    "name_of_streams",
    "open_baselines",
    "pack_order",
    "read_order",
    "receive_into",
)

MEETING_KEY: Final = "asynckv bench"
MAX_NBYTES: Final = 128 * 2**20
"""Memory of a raw socket's other end, and so the largest part that one moves."""
MAX_PARTS: Final = 2**20

_TOKEN_NBYTES: Final = 32
_TOKEN_TIMEOUT_S: Final = 5.0
_MAX_ANSWER_NBYTES: Final = 2**20
_CPU_NBYTES: Final = 8
_ORDER: Final = struct.Struct("!BxxxIQ")


class Kind(enum.IntEnum):
    """What a connection is, as its first byte says."""

    RAW = 1
    STREAMS = 2
    ECHO = 3


class What(enum.IntEnum):
    """Orders to a raw socket. The streams know the first one only."""

    PULL = 1
    PUSH = 2
    CPU = 3


class Meeting(msgspec.Struct, frozen=True):
    """Where the baselines of a serving side are."""

    port: int
    token: bytes


def meeting_as_tensor(meeting: Meeting) -> torch.Tensor:
    """Return the meeting as a store takes it."""
    encoded = msgspec.msgpack.encode(meeting)
    return torch.frombuffer(bytearray(encoded), dtype=torch.uint8)


def meeting_from(tensor: torch.Tensor) -> Meeting:
    """Return what the serving side had put there.

    :raises ValueError: it is no meeting
    """
    encoded = tensor.numpy().view(numpy.uint8).tobytes()
    meeting = msgspec.msgpack.decode(encoded, type=Meeting)
    if len(meeting.token) != _TOKEN_NBYTES or not 0 < meeting.port < 65536:
        raise ValueError(f"no meeting: port {meeting.port}")
    return meeting


def pack_order(what: What, parts: int, nbytes: int) -> bytes:
    """Return what to do with how many parts of how many bytes each, as it is sent."""
    return _ORDER.pack(what, parts, nbytes)


def read_order(packed: bytes) -> tuple[What, int, int]:
    """Return what to do, the number of parts and the bytes of each.

    :raises ValueError: no order, or one beyond what this side has memory for
    """
    what, parts, nbytes = _ORDER.unpack(packed)
    if parts > MAX_PARTS or nbytes > MAX_NBYTES:
        raise ValueError(f"{parts} parts of {nbytes} bytes")
    return What(what), parts, nbytes


def receive_into(connection: socket.socket, target: memoryview) -> None:
    """Fill ``target``.

    :raises ConnectionError: the peer hung up before
    """
    got = 0
    while got < target.nbytes:
        count = connection.recv_into(target[got:], 0, socket.MSG_WAITALL)
        if not count:
            raise ConnectionError("the raw baseline hung up")
        got += count


def _hang_up(connection: socket.socket) -> None:
    """Hang up. Also from another thread: a call that waits ends with an error."""
    with contextlib.suppress(OSError):  # the peer may have been first
        connection.shutdown(socket.SHUT_RDWR)


class BaselineServer:
    """Answers the connections of a bench's baselines. Used as a context manager.

    Listens as soon as it is made. Raw sockets send memory of their own.
    """

    def __init__(self, host: str) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family)
        self._listener.setblocking(False)
        port = self._listener.getsockname()[1]
        self.meeting = Meeting(port, secrets.token_bytes(_TOKEN_NBYTES))
        """What lets a measuring side in."""
        self._connections = OwnTasks()
        self._accepting = OwnTasks()
        self._threads = concurrent.futures.ThreadPoolExecutor(MAX_LANES, "raw baseline")

    async def __aenter__(self) -> Meeting:
        """Return what lets a measuring side in."""
        self._accepting.own(self._accept_forever(), "listener of the baselines")
        return self.meeting

    async def __aexit__(self, *_: object) -> None:
        """Hang up on everybody."""
        await self._accepting.quiesce()
        self._listener.close()
        await self._connections.quiesce()
        self._threads.shutdown(wait=False)

    async def _accept_forever(self) -> None:
        loop = asyncio.get_running_loop()
        with contextlib.suppress(OSError):
            while True:
                connection, _ = await loop.sock_accept(self._listener)
                # Those of one bench: a raw one a lane, the streams, the echo.
                if len(self._connections) >= MAX_LANES + 2:
                    connection.close()
                else:
                    self._connections.own(self._answer(connection), "baseline")

    async def _answer(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            kind = await self._kind_of(connection)
            if kind is Kind.RAW:
                await self._answer_raw(connection)
            elif kind is Kind.STREAMS:
                await _answer_streams(connection)
            else:
                await answer_echoes(connection)
        except (OSError, EOFError, ValueError):
            pass  # it hung up, brings no token, or says what no bench says
        finally:
            connection.close()

    async def _kind_of(self, connection: socket.socket) -> Kind:
        """Wait until a connection has shown the token.

        :raises ValueError: it shows another one
        """
        loop = asyncio.get_running_loop()
        connection.setblocking(False)
        shown = b""
        async with asyncio.timeout(_TOKEN_TIMEOUT_S):
            while missing := 1 + _TOKEN_NBYTES - len(shown):
                if not (received := await loop.sock_recv(connection, missing)):
                    raise EOFError
                shown += received
        if not hmac.compare_digest(shown[1:], self.meeting.token):
            raise ValueError("another token")
        return Kind(shown[0])

    async def _answer_raw(self, connection: socket.socket) -> None:
        connection.setblocking(True)
        peer = _RawPeer(connection)
        loop = asyncio.get_running_loop()
        try:
            await loop.run_in_executor(self._threads, peer.obey_forever)
        finally:
            _hang_up(connection)


class _RawPeer:
    """One raw socket, and the memory that it sends from and receives into."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._memory = numpy.ones(0, dtype=numpy.uint8)
        self._shape = (0, 0)
        self._places: list[memoryview] = []

    def obey_forever(self) -> None:
        order = bytearray(_ORDER.size)
        while True:
            receive_into(self._connection, memoryview(order))
            self._obey(*read_order(bytes(order)))

    def _obey(self, what: What, parts: int, nbytes: int) -> None:
        if what is What.CPU:
            answer = time.process_time_ns().to_bytes(_CPU_NBYTES, "big")
            self._connection.sendall(answer)
            return
        self._make_places(parts, nbytes)
        for place in itertools.islice(itertools.cycle(self._places), parts):
            if what is What.PULL:
                self._connection.sendall(place)
            else:
                receive_into(self._connection, place)
        if what is What.PUSH:
            self._connection.sendall(b"k")

    def _make_places(self, parts: int, nbytes: int) -> None:
        """Have memory for the parts: of its own for each, as far as there is."""
        if self._shape == (parts, nbytes):
            return
        different = max(1, min(parts, MAX_NBYTES // max(1, nbytes)))
        if self._memory.nbytes < different * nbytes:
            self._memory = numpy.ones(different * nbytes, dtype=numpy.uint8)
        view = self._memory.data
        self._places = [view[i * nbytes : (i + 1) * nbytes] for i in range(different)]
        self._shape = (parts, nbytes)


async def _answer_streams(connection: socket.socket) -> None:
    reader, writer = await asyncio.open_connection(sock=connection)
    answer = b""
    try:
        while True:
            what, _, nbytes = read_order(await reader.readexactly(_ORDER.size))
            if what is not What.PULL or nbytes > _MAX_ANSWER_NBYTES:
                return
            if len(answer) != nbytes:
                answer = bytes(nbytes)
            writer.write(answer)
            await writer.drain()
    finally:
        writer.transport.abort()


def connect_to(
    host: str, meeting: Meeting, kind: Kind, *, timeout_s: float = 60.0
) -> socket.socket:
    """Connect and show the token. Blocks; ``timeout_s`` bounds each system call.

    :raises OSError: nothing listens there
    """
    connection = socket.create_connection((host, meeting.port), timeout_s)
    # Python's own timeout would make it a non-blocking socket, which is slower.
    connection.settimeout(None)
    kernel_timeout = struct.pack("@ll", int(timeout_s), 0)
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        connection.setsockopt(socket.SOL_SOCKET, option, kernel_timeout)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.sendall(bytes([kind]) + meeting.token)
    return connection


def name_of_streams(count: int) -> str:
    """Say plainly how many there are.

    >>> name_of_streams(1), name_of_streams(4)
    ('raw TCP, 1 stream', 'raw TCP, 4 streams')
    """
    return f"raw TCP, {count} stream{'' if count == 1 else 's'}"


class RawStreams:
    """The measuring side's raw sockets, which share out the parts of a transfer.

    Everything here blocks. Threads are made when they are needed first, and end when
    this is closed.
    """

    def __init__(self, host: str, meeting: Meeting, count: int = 1) -> None:
        self._threads = concurrent.futures.ThreadPoolExecutor(count, "raw stream")
        self._sockets: list[socket.socket] = []
        with contextlib.ExitStack() as stack:
            stack.callback(self.close)
            for _ in range(count):
                self._sockets.append(connect_to(host, meeting, Kind.RAW))
            stack.pop_all()

    def __len__(self) -> int:
        return len(self._sockets)

    def pull(self, targets: Sequence[memoryview], streams: int = 1) -> float:
        """Receive parts of equal size over so many streams; return the seconds.

        Each stream takes its parts one by one. Whatever happens, no thread
        touches a target any more afterwards.

        :raises OSError: the peer hung up on one of them
        """
        began_s = time.perf_counter()
        if streams == 1:
            _pull(self._sockets[0], targets)
        else:
            shares = [
                self._threads.submit(_pull, one, targets[number::streams])
                for number, one in enumerate(self._sockets[:streams])
            ]
            concurrent.futures.wait(shares)
            for share in shares:
                share.result()
        return time.perf_counter() - began_s

    def push(self, sources: Sequence[memoryview]) -> float:
        """Send parts of equal size until the peer says that it has them all."""
        first = self._sockets[0]
        began_s = time.perf_counter()
        first.sendall(pack_order(What.PUSH, len(sources), sources[0].nbytes))
        for source in sources:
            first.sendall(source)
        receive_into(first, memoryview(bytearray(1)))
        return time.perf_counter() - began_s

    def cpu_s(self) -> float:
        """Return the CPU seconds that the peer's process has used."""
        answer = bytearray(_CPU_NBYTES)
        self._sockets[0].sendall(pack_order(What.CPU, 1, _CPU_NBYTES))
        receive_into(self._sockets[0], memoryview(answer))
        return int.from_bytes(answer, "big") / 1e9

    def close(self) -> None:
        """Hang up. Never waits; a call that waits ends with an error."""
        for connection in self._sockets:
            _hang_up(connection)
            connection.close()
        self._threads.shutdown(wait=False)


def _pull(connection: socket.socket, targets: Sequence[memoryview]) -> None:
    connection.sendall(pack_order(What.PULL, len(targets), targets[0].nbytes))
    for target in targets:
        receive_into(connection, target)


class StreamsConnection:
    """The asking side of the bare asyncio streams. Made by :meth:`open`."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def open(cls, connection: socket.socket) -> StreamsConnection:
        """Go on with a connection of that kind."""
        return cls(*await asyncio.open_connection(sock=connection))

    async def exchange(
        self, requests: int, outstanding: int, nbytes: int
    ) -> list[float]:
        """Ask ``requests`` times with at most ``outstanding`` open; return seconds.

        :raises asyncio.IncompleteReadError: the peer hung up
        """
        order = pack_order(What.PULL, 1, nbytes)
        began: collections.deque[float] = collections.deque()
        calls: list[float] = []
        while len(calls) < requests:
            while len(began) < min(outstanding, requests - len(calls)):
                began.append(time.perf_counter())
                self._writer.write(order)
            await self._reader.readexactly(nbytes)
            calls.append(time.perf_counter() - began.popleft())
        return calls

    def close(self) -> None:
        """Hang up. Never waits."""
        self._writer.transport.abort()


@dataclasses.dataclass(frozen=True)
class Baselines:
    """The measuring side's connections to all baselines of a serving side."""

    raw: RawStreams
    streams: StreamsConnection
    echo: EchoConnection


@contextlib.asynccontextmanager
async def open_baselines(
    host: str, meeting: Meeting, count: int, thread: concurrent.futures.Executor
) -> AsyncIterator[Baselines]:
    """Connect to all baselines, with ``count`` raw streams; what blocks in ``thread``.

    :raises OSError: nothing listens there
    """
    loop = asyncio.get_running_loop()
    with contextlib.ExitStack() as stack:

        async def connected(kind: Kind) -> socket.socket:
            found = await loop.run_in_executor(thread, connect_to, host, meeting, kind)
            found.setblocking(False)
            return found

        raw = await loop.run_in_executor(thread, RawStreams, host, meeting, count)
        stack.callback(raw.close)
        streams = await StreamsConnection.open(await connected(Kind.STREAMS))
        stack.callback(streams.close)
        echo = await EchoConnection.open(await connected(Kind.ECHO))
        stack.callback(echo.close)
        yield Baselines(raw, streams, echo)


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
