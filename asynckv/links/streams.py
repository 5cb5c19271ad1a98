"""The control connection of a link: bytes out, bytes in, never waiting.

A stream belongs to one loop and calls its owner there. It keeps at most what
one ``write`` was given: the owner waits for :meth:`StreamOwner.on_writable`
before it writes more.
"""

from __future__ import annotations

import abc
import asyncio
import collections
import contextlib
import socket
from typing import Final, Protocol

from asynckv.errors import PeerLost
from asynckv.links.address import host_in
from asynckv.protocol.frames import Frame
from asynckv.security.tls_socket import Connection, TlsSocket

__all__ = (
    "ControlStream",
    "MemoryStream",
    "SocketStream",
    "StreamHandler",
    "StreamOwner",
)

_RECEIVE_BYTES: Final = 64 * 1024
_MOST_BYTES: Final = 256 * 1024
"""Who says much is heard so much at a time: each time costs a wake-up and writes."""


class StreamOwner(Protocol):
    """Who is told what happens on a stream. Plain functions, on the loop."""

    def on_bytes(self, data: bytes) -> None:
        """Bytes came."""

    def on_writable(self) -> None:
        """All that was written has left; more may be written."""

    def on_end(self, error: OSError | None) -> None:
        """Nothing more will come: the peer hung up, or the connection broke."""


class StreamHandler(Protocol):
    """Who is told what comes on one stream of a link. Plain functions on the loop.

    A :exc:`~asynckv.errors.ProtocolError` from :meth:`on_frame` breaks the
    link and tells the peer why. Any other exception is a fault of ours: it is
    logged and the link is aborted.
    """

    def on_frame(self, frame: Frame, body: bytes) -> None:
        """A frame came, with its whole body."""

    def on_lost(self, error: PeerLost) -> None:
        """The link ended before the stream did. Called once, on a later tick.

        ``error.goodbye`` tells a clean close by either side from a loss. Each
        handler gets an error of its own, which it may raise.
        """


class ControlStream(abc.ABC):
    """A connection whose reading and writing halves end on their own."""

    sent_bytes: int = 0
    """How many bytes have left in all."""
    own_host: str = ""
    """This end's IP address; empty if the connection does not leave this host."""
    peer_host: str = ""
    """The other end's IP address, as this host's kernel has it; or empty."""
    unsent_bytes: int = 0
    """Bytes that were written and have not left; 0 means: write more."""

    @abc.abstractmethod
    def start(self, owner: StreamOwner) -> None:
        """Begin to read. Nothing is read, and no one called, before."""

    @abc.abstractmethod
    def write(self, data: bytes) -> None:
        """Send ``data``. Only while ``unsent_bytes`` is 0."""

    @abc.abstractmethod
    def finish(self) -> None:
        """End the writing half; the peer sees the end, and may still write."""

    @abc.abstractmethod
    def pause_reading(self) -> None:
        """Leave what comes where it is."""

    @abc.abstractmethod
    def resume_reading(self) -> None:
        """Read on."""

    @abc.abstractmethod
    def abort(self) -> None:
        """Close now; nobody is called any more. Safe to call again."""


class SocketStream(ControlStream):
    """A connected, non-blocking stream socket on the running loop, plain or TLS.

    The loop only says when it is readable: a send leaves at once, in the same
    tick, and a receive goes to the owner without a task in between.
    """

    def __init__(self, sock: Connection, loop: asyncio.AbstractEventLoop) -> None:
        self._sock = sock
        with contextlib.suppress(OSError):  # it is gone: reading will tell
            self.own_host = host_in(sock.getsockname())
            self.peer_host = host_in(sock.getpeername())
        self._loop = loop
        self._owner: StreamOwner | None = None
        self._unsent = memoryview(b"")
        self._at_once = _RECEIVE_BYTES
        self._reads = False
        self._finishing = False
        self._closed = False

    def start(self, owner: StreamOwner) -> None:
        self._owner = owner
        self.resume_reading()
        if isinstance(self._sock, TlsSocket) and self._sock.pending():
            # Deciphered with the end of the greeting: no socket will tell.
            self._loop.call_soon(self._read)

    def write(self, data: bytes) -> None:
        if self._closed:
            return
        sent = self._send(data)
        if sent < len(data):
            self._keep(memoryview(data)[sent:])
            self._loop.add_writer(self._sock, self._write_on)

    def finish(self) -> None:
        if self._closed or (self._finishing and not self._unsent):
            return
        self._finishing = True
        if not self._unsent:
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_WR)

    def pause_reading(self) -> None:
        if self._reads:
            self._reads = False
            self._loop.remove_reader(self._sock)

    def resume_reading(self) -> None:
        if not self._reads and not self._closed:
            self._reads = True
            self._loop.add_reader(self._sock, self._read)

    def abort(self) -> None:
        if self._closed:
            return
        self.pause_reading()
        self._stop_writing()
        self._closed = True
        self._owner = None
        self._sock.close()

    def _send(self, data: bytes | memoryview) -> int:
        try:
            sent = self._sock.send(data)
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError as exc:
            # The owner may be in the middle of something: told on its own tick.
            self._loop.call_soon(self._end, exc)
            return len(data)
        self.sent_bytes += sent
        return sent

    def _write_on(self) -> None:
        self._keep(self._unsent[self._send(self._unsent) :])
        if self._unsent:
            return
        self._stop_writing()
        if self._finishing:
            self._finishing = False
            self.finish()
        elif self._owner is not None:
            self._owner.on_writable()

    def _stop_writing(self) -> None:
        self._loop.remove_writer(self._sock)
        self._keep(memoryview(b""))

    def _keep(self, unsent: memoryview) -> None:
        self._unsent = unsent
        self.unsent_bytes = len(unsent)

    def _read(self) -> None:
        if not self._reads:
            return
        try:
            data = self._sock.recv(self._at_once)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as exc:
            self._end(exc)
            return
        self._at_once = _RECEIVE_BYTES if len(data) < _RECEIVE_BYTES else _MOST_BYTES
        if not data:
            self._end(None)
        elif self._owner is not None:
            self._owner.on_bytes(data)

    def _end(self, error: OSError | None) -> None:
        self.pause_reading()
        if self._owner is not None:
            self._owner.on_end(error)


class MemoryStream(ControlStream):
    """One end of a pair; what one writes, the other receives a tick later."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._owner: StreamOwner | None = None
        self._other: MemoryStream = self
        # What the other end wrote and this one has not received; None ends it.
        self._inbox: collections.deque[bytes | None] = collections.deque()
        self._paused = True
        self._closed = False
        self._finished = False
        self._delivery: asyncio.Handle | None = None

    @classmethod
    def pair(cls, loop: asyncio.AbstractEventLoop) -> tuple[MemoryStream, MemoryStream]:
        """Return two connected ends."""
        one, two = cls(loop), cls(loop)
        one._other, two._other = two, one
        return one, two

    def start(self, owner: StreamOwner) -> None:
        self._owner = owner
        self.resume_reading()

    def write(self, data: bytes) -> None:
        if not self._closed and not self._finished:
            self._other._accept(data)

    def finish(self) -> None:
        if not self._closed and not self._finished:
            self._finished = True
            self._other._accept(None)

    def pause_reading(self) -> None:
        self._paused = True

    def resume_reading(self) -> None:
        self._paused = False
        self._deliver_soon()

    def abort(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._owner = None
        self._inbox.clear()
        self._other.unsent_bytes = 0
        if self._delivery is not None:
            self._delivery.cancel()
        if not self._finished:
            self._other._accept(None)

    def _accept(self, data: bytes | None) -> None:
        if self._closed:
            return
        self._inbox.append(data)
        self._other.unsent_bytes += len(data or b"")
        self._deliver_soon()

    def _deliver_soon(self) -> None:
        if self._inbox and self._delivery is None and not self._paused:
            self._delivery = self._loop.call_soon(self._deliver)

    def _deliver(self) -> None:
        self._delivery = None
        while self._inbox and not self._paused and self._owner is not None:
            data = self._inbox.popleft()
            if data is None:
                self._owner.on_end(None)
                return
            self._other.unsent_bytes -= len(data)
            self._other.sent_bytes += len(data)
            self._owner.on_bytes(data)
        if not self._other.unsent_bytes and self._other._owner is not None:
            self._other._owner.on_writable()
