"""The baselines of a bench, both sides: raw TCP sockets, and bare asyncio streams.

One raw socket, or several with a thread for each; all of that blocks, and is called in
threads. The streams send small orders out and constant bytes back, in order. None does
any of asynckv's work.

The serving side puts a :class:`Meeting` into its store, where only those read it that
the link has let in; its token opens the sockets. Who does not bring it is hung up on;
who does gets constant bytes and the process's CPU seconds, within fixed bounds of
memory.
"""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import contextlib
import enum
import hmac
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

import msgspec
import numpy
import torch

from asynckv.protocol.handshake import MAX_LANES

__all__ = (
    "MAX_NBYTES",
    "MAX_PARTS",
    "MEETING_KEY",
    "ORDER",
    "PING_NBYTES",
    "TOKEN_NBYTES",
    "Meeting",
    "RawConnection",
    "RawServer",
    "RawStreams",
    "StreamsConnection",
    "StreamsServer",
    "What",
    "meeting_as_tensor",
    "meeting_from",
    "name_of_streams",
    "read_order",
    "receive_into",
)


MEETING_KEY: Final = "asynckv bench"
TOKEN_NBYTES: Final = 32
PING_NBYTES: Final = 64
MAX_NBYTES: Final = 128 * 2**20
"""Memory of a raw socket's other end, and so the largest part that one moves."""
MAX_PARTS: Final = 2**20
ORDER: Final = struct.Struct("!BxxxIQ")
"""What to do, with how many parts, of how many bytes each."""


class What(enum.IntEnum):
    """Orders to a raw socket."""

    PULL = 1
    PUSH = 2
    CPU = 3


class Meeting(msgspec.Struct, frozen=True):
    """Where the baselines of a serving side are."""

    raw_port: int
    streams_port: int
    echo_port: int
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
    ports = (meeting.raw_port, meeting.streams_port, meeting.echo_port)
    if len(meeting.token) != TOKEN_NBYTES or not all(0 < p < 65536 for p in ports):
        raise ValueError(f"no meeting: ports {ports}")
    return meeting


def read_order(packed: bytes) -> tuple[What, int, int]:
    """Return what to do, the number of parts and the bytes of each.

    :raises ValueError: no order, or one beyond what this side has memory for
    """
    what, parts, nbytes = ORDER.unpack(packed)
    if parts > MAX_PARTS or nbytes > MAX_NBYTES:
        raise ValueError(f"{parts} parts of {nbytes} bytes")
    return What(what), parts, nbytes


_CPU_NBYTES = 8


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


class RawConnection:
    """The measuring side of a raw socket. ``timeout_s`` bounds each system call."""

    def __init__(
        self, host: str, port: int, token: bytes, *, timeout_s: float = 60.0
    ) -> None:
        self._socket = socket.create_connection((host, port), timeout_s)
        # Python's own timeout would make it a non-blocking socket, which is slower.
        self._socket.settimeout(None)
        kernel_timeout = struct.pack("@ll", int(timeout_s), 0)
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            self._socket.setsockopt(socket.SOL_SOCKET, option, kernel_timeout)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.sendall(token)

    def pull(self, targets: Sequence[memoryview]) -> float:
        """Receive parts of equal size one by one; return the seconds."""
        began_s = time.perf_counter()
        self._order(What.PULL, len(targets), targets[0].nbytes)
        for target in targets:
            receive_into(self._socket, target)
        return time.perf_counter() - began_s

    def push(self, sources: Sequence[memoryview]) -> float:
        """Send parts of equal size until the peer says that it has them all."""
        began_s = time.perf_counter()
        self._order(What.PUSH, len(sources), sources[0].nbytes)
        for source in sources:
            self._socket.sendall(source)
        receive_into(self._socket, memoryview(bytearray(1)))
        return time.perf_counter() - began_s

    def ping(self, times: int) -> list[float]:
        """Return the seconds of each of ``times`` round trips, one by one."""
        target = [memoryview(bytearray(PING_NBYTES))]
        return [self.pull(target) for _ in range(times)]

    def cpu_s(self) -> float:
        """Return the CPU seconds that the peer's process has used."""
        answer = bytearray(_CPU_NBYTES)
        self._order(What.CPU, 1, _CPU_NBYTES)
        receive_into(self._socket, memoryview(answer))
        return int.from_bytes(answer, "big") / 1e9

    def close(self) -> None:
        """Hang up. Also from another thread: a call that waits ends with an error."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # the peer was first
        self._socket.close()

    def _order(self, what: What, parts: int, nbytes: int) -> None:
        self._socket.sendall(ORDER.pack(what, parts, nbytes))


def name_of_streams(count: int) -> str:
    """Say plainly how many there are.

    >>> name_of_streams(1), name_of_streams(4)
    ('raw TCP, 1 stream', 'raw TCP, 4 streams')
    """
    return f"raw TCP, {count} stream{'' if count == 1 else 's'}"


class RawStreams:
    """Connections to the same process that share out the parts of a transfer.

    Threads are made when they are needed first, and end when this is closed.
    """

    def __init__(self, host: str, port: int, token: bytes, count: int) -> None:
        self._connections: list[RawConnection] = []
        self._threads = concurrent.futures.ThreadPoolExecutor(count, "raw stream")
        with contextlib.ExitStack() as stack:
            stack.callback(self.close)
            for _ in range(count):
                self._connections.append(RawConnection(host, port, token))
            stack.pop_all()

    def __len__(self) -> int:
        return len(self._connections)

    @property
    def first(self) -> RawConnection:
        """The one for everything that needs but one."""
        return self._connections[0]

    def pull(self, targets: Sequence[memoryview], streams: int) -> float:
        """Receive parts of equal size over so many streams; return the seconds.

        Each stream takes its parts one by one. Whatever happens, no thread
        touches a target any more afterwards.

        :raises OSError: the peer hung up on one of them
        """
        if streams == 1:
            return self.first.pull(targets)
        began_s = time.perf_counter()
        shares = [
            self._threads.submit(one.pull, targets[number::streams])
            for number, one in enumerate(self._connections[:streams])
        ]
        concurrent.futures.wait(shares)
        for share in shares:
            share.result()
        return time.perf_counter() - began_s

    def close(self) -> None:
        """Hang up. Never waits; a call that waits ends with an error."""
        for connection in self._connections:
            connection.close()
        self._threads.shutdown(wait=False)


_TOKEN_TIMEOUT_S = 5.0


class RawServer:
    """Answers raw sockets until it is closed. Listens as soon as it is made.

    It sends memory of its own, or ``sources``, of which each connection begins at
    another place.
    """

    def __init__(
        self, host: str, token: bytes, sources: Sequence[memoryview] = ()
    ) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family)
        self._token = token
        self._sources = collections.deque(sources)
        self._connections: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._is_closed = False
        self.port: int = self._listener.getsockname()[1]
        _start_thread(self._accept_forever)

    def close(self) -> None:
        """Hang up on everybody. Never waits; the threads end by themselves then."""
        with self._lock:
            self._is_closed = True
            for connection in (self._listener, *self._connections):
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def _accept_forever(self) -> None:
        with self._listener:
            while not self._is_closed:
                try:
                    connection, _ = self._listener.accept()
                except OSError:
                    break
                if self._add(connection):
                    _start_thread(self._answer, connection)

    def _add(self, connection: socket.socket) -> bool:
        with self._lock:
            if self._is_closed or len(self._connections) >= MAX_LANES:
                connection.close()
                return False
            self._connections.add(connection)
            return True

    def _rotated(self) -> list[memoryview]:
        with self._lock:
            self._sources.rotate(-(len(self._sources) // 4))
            return list(self._sources)

    def _answer(self, connection: socket.socket) -> None:
        try:
            if self._is_invited(connection):
                _RawPeer(connection, self._rotated()).obey_forever()
        except (OSError, ValueError):
            pass  # it hung up, or says what no bench says
        finally:
            with self._lock:
                self._connections.discard(connection)
                connection.close()

    def _is_invited(self, connection: socket.socket) -> bool:
        connection.settimeout(_TOKEN_TIMEOUT_S)
        token = bytearray(TOKEN_NBYTES)
        receive_into(connection, memoryview(token))
        connection.settimeout(None)
        return hmac.compare_digest(token, self._token)


def _start_thread(function: Callable[..., None], *arguments: object) -> None:
    name = "raw baseline"
    threading.Thread(target=function, args=arguments, name=name, daemon=True).start()


class _RawPeer:
    """One connection, and the memory that it sends from and receives into."""

    def __init__(
        self, connection: socket.socket, sources: Sequence[memoryview]
    ) -> None:
        self._connection = connection
        self._sources = sources
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._memory = numpy.ones(0, dtype=numpy.uint8)
        self._shape = (0, 0)
        self._places: list[memoryview] = []

    def obey_forever(self) -> None:
        order = bytearray(ORDER.size)
        while True:
            receive_into(self._connection, memoryview(order))
            self._obey(*read_order(bytes(order)))

    def _obey(self, what: What, parts: int, nbytes: int) -> None:
        if what is What.CPU:
            self._connection.sendall(time.process_time_ns().to_bytes(8, "big"))
            return
        places = self._sources
        if what is not What.PULL or not places or nbytes != len(places[0]):
            self._make_places(parts, nbytes)
            places = self._places
        for number in range(parts):
            place = places[number % len(places)]
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


_MAX_ANSWER_NBYTES = 2**20


class StreamsServer:
    """Answers orders with constant bytes. Used as a context manager."""

    def __init__(self, host: str, token: bytes) -> None:
        self._host = host
        self._token = token
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> int:
        """Return the port."""
        self._server = await asyncio.start_server(self._answer, self._host, 0)
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def __aexit__(self, *_: object) -> None:
        if self._server is not None:
            self._server.close()
        for writer in self._writers:
            writer.transport.abort()
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def _answer(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        task = asyncio.current_task()
        if task is not None:
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        self._writers.add(writer)
        try:
            await self._answer_forever(reader, writer)
        except (OSError, ValueError, asyncio.IncompleteReadError):
            pass  # it hung up, or says what no bench says
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _answer_forever(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        async with asyncio.timeout(_TOKEN_TIMEOUT_S):
            token = await reader.readexactly(TOKEN_NBYTES)
        if not hmac.compare_digest(token, self._token):
            return
        answer = b""
        while True:
            order = read_order(await reader.readexactly(ORDER.size))
            what, _, nbytes = order
            if what is not What.PULL or nbytes > _MAX_ANSWER_NBYTES:
                return
            if len(answer) != nbytes:
                answer = bytes(nbytes)
            writer.write(answer)
            await writer.drain()


class StreamsConnection:
    """The asking side of the exchange. Made by :meth:`open`."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def open(cls, host: str, port: int, token: bytes) -> StreamsConnection:
        """Connect and show the token."""
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(token)
        return cls(reader, writer)

    async def exchange(
        self, requests: int, outstanding: int, nbytes: int
    ) -> list[float]:
        """Ask ``requests`` times with at most ``outstanding`` open; return seconds.

        :raises asyncio.IncompleteReadError: the peer hung up
        """
        order = ORDER.pack(What.PULL, 1, nbytes)
        began: collections.deque[float] = collections.deque()
        calls: list[float] = []
        for _ in range(min(outstanding, requests)):
            began.append(time.perf_counter())
            self._writer.write(order)
        while began:
            await self._reader.readexactly(nbytes)
            calls.append(time.perf_counter() - began.popleft())
            if len(calls) + len(began) < requests:
                began.append(time.perf_counter())
                self._writer.write(order)
        return calls

    def close(self) -> None:
        """Hang up. Never waits."""
        self._writer.transport.abort()
