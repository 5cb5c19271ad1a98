"""The socket of a payload lane: plain or TLS, shared by the threads that use it.

Whole pieces go over it, for threads that may wait, and are woken by ``shutdown()``.
What a thread has to say goes to a :class:`LaneOwner`, from that thread. Small pieces of
memory are moved together by one system call; large ones go alone: a call that moves
many of those keeps others waiting, and saves nothing.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import socket
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, Protocol

from asynckv.errors import AsyncKVError
from asynckv.security.tls_socket import Connection, TlsSocket, WantsToWrite
from asynckv.transports.parts import Part

__all__ = (
    "DEAD_S",
    "LaneOwner",
    "LaneSocket",
    "LaneWire",
    "PlainWire",
    "TlsWire",
    "rest_of",
    "vectors_of",
    "wire_over",
)


_FULL_NBYTES: Final = 256 * 1024
_MOST_PIECES: Final = 512
"""The kernel takes 1,024."""


def vectors_of(pieces: Sequence[memoryview]) -> Iterator[list[memoryview]]:
    """Yield the pieces in order, as many together as one call should move."""
    vector: list[memoryview] = []
    nbytes = 0
    for piece in pieces:
        vector.append(piece)
        nbytes += len(piece)
        if nbytes >= _FULL_NBYTES or len(vector) == _MOST_PIECES:
            yield vector
            vector, nbytes = [], 0
    if nbytes:
        yield vector


def rest_of(vector: Sequence[memoryview], moved: int) -> Sequence[memoryview]:
    """Return what is left of it when so many bytes have moved."""
    for index, piece in enumerate(vector):
        if moved < len(piece):
            return [piece[moved:], *vector[index + 1 :]]
        moved -= len(piece)
    return ()


_RECORD_BYTES: Final = 16 * 1024
_WRITE_BYTES: Final = 256 * 1024
"""As much is enciphered at a time; the other direction has its turn after it."""


class LaneWire(Protocol):
    """What the threads of a lane do with its connection."""

    def send(self, header: bytes, pieces: Sequence[memoryview]) -> None:
        """Send all of it, in order.

        :raises OSError: the peer is gone, or the lane was shut down
        """

    def receive_some(self, into: Sequence[memoryview]) -> int:
        """Fill ``into`` as far as it goes without a break; 0 if nothing comes.

        :raises OSError: the connection broke
        """


def wire_over(sock: Connection) -> LaneWire:
    """Return what moves pieces over ``sock``."""
    return TlsWire(sock) if isinstance(sock, TlsSocket) else PlainWire(sock)


class PlainWire(LaneWire):
    """Over a blocking socket."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(True)
        self._sock = sock

    def send(self, header: bytes, pieces: Sequence[memoryview]) -> None:
        for vector in vectors_of([memoryview(header), *pieces]):
            left: Sequence[memoryview] = vector
            while left:
                if len(left) == 1:
                    sent = self._sock.send(left[0])
                else:
                    sent = self._sock.sendmsg(left)
                left = rest_of(left, sent)

    def receive_some(self, into: Sequence[memoryview]) -> int:
        if len(into) == 1:
            return self._sock.recv_into(into[0], 0, socket.MSG_WAITALL)
        return self._sock.recvmsg_into(into, 0, socket.MSG_WAITALL)[0]


class TlsWire(LaneWire):
    """Over TLS: what would block is waited for outside of it, by ``poll``."""

    def __init__(self, sock: TlsSocket) -> None:
        self._sock = sock
        self._readable, self._writable = select.poll(), select.poll()
        self._also_writable = select.poll()
        self._readable.register(sock, select.POLLIN)
        self._writable.register(sock, select.POLLOUT)
        self._also_writable.register(sock, select.POLLOUT)

    def send(self, header: bytes, pieces: Sequence[memoryview]) -> None:
        for vector in vectors_of([memoryview(header), *pieces]):
            if max(map(len, vector)) <= _RECORD_BYTES:
                vector = [memoryview(b"".join(vector))]
            for piece in vector:
                for start in range(0, len(piece), _WRITE_BYTES):
                    self._send(piece[start : start + _WRITE_BYTES])

    def receive_some(self, into: Sequence[memoryview]) -> int:
        place, got = into[0], 0
        while got < len(place):
            try:
                count = self._sock.recv_into(place[got:])  # a record at a time
            except WantsToWrite:
                self._also_writable.poll()
            except BlockingIOError:
                self._readable.poll()
            else:
                got += count
                if not count:
                    break
        return got

    def _send(self, data: memoryview) -> None:
        while True:
            try:
                self._sock.send(data)
                return
            except BlockingIOError:
                self._writable.poll()


_NICENESS: Final = 5
DEAD_S: Final = 30.0
"""A lane whose other end acknowledges or takes nothing for so long is over."""
_PROBES: Final = 5
_names = itertools.count(1)


class LaneOwner(Protocol):
    """Who is told what the threads do. Called in those threads."""

    def part_moved(self, part: Part) -> None:
        """The last byte of ``part`` was sent, or has landed."""

    def part_left(self) -> None:
        """A stopped part is no longer touched."""

    def sender_ended(self, error: BaseException | None) -> None:
        """A sender thread ends; with an error if not because it was told to."""

    def receiver_ended(self, error: BaseException | None) -> None:
        """A receiver thread ends: by the peer's hanging up, or by an error."""


class LaneSocket:
    """A connected socket that threads share; the last to leave closes it."""

    def __init__(self, sock: Connection) -> None:
        self.sock = sock
        _notice_silence(sock)
        self._wire = wire_over(sock)
        self._lock = threading.Lock()
        self._threads = 0
        self._is_shut = False

    def start(
        self,
        work: Callable[[], None],
        purpose: str,
        ended: Callable[[BaseException | None], None],
    ) -> bool:
        """Start a thread that does ``work``; ``False`` if the lane is shut down.

        ``ended(error)`` is the last that the thread calls. One that cannot be
        started has ended by that error.
        """
        with self._lock:
            if self._is_shut:
                return False
            self._threads += 1

        def run() -> None:
            error: BaseException | None = None
            try:
                _step_behind_the_loop()
                work()
            except Exception as exc:  # noqa: BLE001 - ended() tells the lane's owner
                error = _without_memory(exc)
            finally:
                self._leave()
                ended(error)

        name = f"asynckv-{purpose}-{next(_names)}"
        try:
            threading.Thread(target=run, name=name, daemon=True).start()
        except RuntimeError as exc:  # the process has as many threads as it may
            self._leave()
            ended(exc)
        return True

    def send(self, header: bytes, pieces: Sequence[memoryview]) -> None:
        """Send all of it, in order.

        :raises OSError: the peer is gone, or the lane was shut down
        """
        self._wire.send(header, pieces)

    def receive(self, into: Sequence[memoryview], *, may_end: bool = False) -> bool:
        """Fill ``into``; ``False`` if the peer hung up before it, and that may be.

        :raises EOFError: the peer hung up where it may not
        :raises OSError: the connection broke
        """
        vectors: Iterable[Sequence[memoryview]]
        vectors = vectors_of(into) if len(into) > 1 else (into,)
        for left in vectors:
            while left:
                count = self._wire.receive_some(left)
                if count == 0:
                    if may_end:
                        return False
                    raise EOFError("the peer hung up within a chunk")
                may_end = False
                if len(left) == 1 and count == len(left[0]):
                    break  # nearly always so
                left = rest_of(left, count)
        return True

    def shut_down(self) -> None:
        """End whatever a thread waits for on the socket. Never waits."""
        with self._lock:
            if self._is_shut:
                return
            self._is_shut = True
            with contextlib.suppress(OSError):
                self.sock.shutdown(socket.SHUT_RDWR)
            self._close_if_over()

    def _leave(self) -> None:
        with self._lock:
            self._threads -= 1
            self._close_if_over()

    def _close_if_over(self) -> None:
        if self._is_shut and not self._threads:
            self.sock.close()


def _notice_silence(sock: Connection) -> None:
    """Let the kernel end a lane that is cut with nobody told, in ``DEAD_S``.

    The link's heartbeat does not go over it. Who sends waits for acknowledgements;
    who receives has to ask: see tcp(7), ``TCP_USER_TIMEOUT``, ``SO_KEEPALIVE``.
    """
    if sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    pause_s = max(1, round(DEAD_S / (_PROBES + 1)))
    for name, value in (
        ("TCP_KEEPIDLE", pause_s),
        ("TCP_KEEPINTVL", pause_s),
        ("TCP_KEEPCNT", _PROBES),
        ("TCP_USER_TIMEOUT", round(DEAD_S * 1000)),
    ):
        option = getattr(socket, name, None)  # Linux has them all
        if option is not None:
            sock.setsockopt(socket.IPPROTO_TCP, option, value)


def _step_behind_the_loop() -> None:
    """Where lanes want more cores than there are, the event loop comes first."""
    if sys.platform == "linux":  # elsewhere a thread has no priority of its own
        with contextlib.suppress(OSError):
            os.nice(_NICENESS)


def _without_memory(error: Exception) -> Exception:
    """Drop the tracebacks of what the world does: their frames hold the payload."""
    if isinstance(error, OSError | EOFError | AsyncKVError):
        behind: BaseException | None = error
        while behind is not None:
            behind.__traceback__ = None
            behind = behind.__cause__ or behind.__context__
    return error
