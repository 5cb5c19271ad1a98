"""The control connection of a link: bytes out, bytes in, never waiting.

A stream belongs to one loop and calls its owner there. It keeps at most what
one ``write`` was given: the owner waits for :meth:`StreamOwner.on_writable`
before it writes more.

What leaves is written in one place, and bounded where a peer decides. Of what is queued
in a tick the first request, or the first answer, leaves at once: the other side can
begin. All else leaves in one write at the tick's end. While more than 4 MiB of answers
wait for a peer, nothing more of it is read: one that never reads cannot make us hold
memory.
"""

from __future__ import annotations

import abc
import asyncio
import collections
import contextlib
import socket
from collections.abc import Callable
from typing import Final, Protocol

from asynckv.affinity import ProcessBound
from asynckv.errors import PeerLost
from asynckv.links.address import host_in
from asynckv.protocol.frames import Frame
from asynckv.protocol.outbox import Outbox
from asynckv.security.tls_socket import Connection, TlsSocket

__all__ = (
    "LOW_BYTES",
    "MAX_ANSWER_BYTES",
    "ControlStream",
    "LinkWriter",
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


class SocketStream(ControlStream, ProcessBound):
    """A connected, non-blocking stream socket on the running loop, plain or TLS.

    The loop only says when it is readable: a send leaves at once, in the same
    tick, and a receive goes to the owner without a task in between. A forked child
    can do nothing with it but close its copy of the socket.
    """

    def __init__(self, sock: Connection, loop: asyncio.AbstractEventLoop) -> None:
        self._own()
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

    def write(self, data: bytes | memoryview) -> None:
        if self._closed or self._is_copy:
            return
        try:
            sent = self._sock.send(data)
        except (BlockingIOError, InterruptedError):
            sent = 0
        except OSError as exc:
            # The owner may be in the middle of something: told on its own tick.
            self._loop.call_soon(self._end, exc)
            return
        self.sent_bytes += sent
        if sent < len(data):
            self._keep(memoryview(data)[sent:])
            self._loop.add_writer(self._sock, self._write_on)

    def finish(self) -> None:
        if self._closed or self._is_copy or (self._finishing and not self._unsent):
            return
        self._finishing = True
        if not self._unsent:
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_WR)

    def pause_reading(self) -> None:
        if self._reads and not self._is_copy:
            self._reads = False
            self._loop.remove_reader(self._sock)

    def resume_reading(self) -> None:
        if not (self._reads or self._closed or self._is_copy):
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

    def _write_on(self) -> None:
        unsent = self._unsent
        self._stop_writing()
        self.write(unsent)
        if self._unsent:
            return
        if self._finishing:
            self._finishing = False
            self.finish()
        elif self._owner is not None:
            self._owner.on_writable()

    def _stop_writing(self) -> None:
        if not self._is_copy:
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
        is_due = self._inbox and self._delivery is None and not self._paused
        if is_due and not self._loop.is_closed():
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


MAX_ANSWER_BYTES: Final = 4 * 2**20
LOW_BYTES: Final = 2**20
_MAX_STUCK_ANSWER_BYTES: Final = 4 * MAX_ANSWER_BYTES
_WRITE_BYTES: Final = 256 * 1024


class LinkWriter:
    """Moves an outbox to a stream, and pauses its reading where it must.

    Whoever handles what came sets ``will_flush`` meanwhile, flushes when more than
    ``max_answer_bytes`` wait, and calls :meth:`end_handling`.
    ``read_on()`` is called, on a later tick, when reading may go on: first with
    what was received already, then by ``resume_reading``.
    """

    def __init__(
        self,
        stream: ControlStream,
        outbox: Outbox,
        loop: asyncio.AbstractEventLoop,
        read_on: Callable[[], None],
    ) -> None:
        self.is_reading_paused = False
        self.will_flush = False
        self.max_answer_bytes = MAX_ANSWER_BYTES
        self._tell_to_read_on = read_on
        self._stream = stream
        self._outbox = outbox
        self._loop = loop
        self._is_last = False
        self._has_begun = False
        self._sent_before = 0
        self._when_drained: list[Callable[[], None]] = []
        self._when_answered: collections.deque[Callable[[], None]] = collections.deque()

    @property
    def nbytes(self) -> int:
        """Bytes that have not left for the kernel yet."""
        return self._outbox.nbytes + self._stream.unsent_bytes

    @property
    def may_write(self) -> bool:
        """Does nothing wait, and did nothing leave at once in this tick?"""
        is_idle = not (self._outbox.nbytes or self._stream.unsent_bytes)
        return is_idle and not (self._has_begun or self._is_last)

    def write_first(self, data: bytes) -> None:
        """As :meth:`flush_first`, of what was not queued; when :attr:`may_write`."""
        self._has_begun = True
        self._stream.write(data)
        if not self.will_flush:
            self.flush_soon()

    def flush_first(self) -> None:
        """Write what is queued at once, if nothing left so in this tick; else soon."""
        if not self._has_begun:
            self._has_begun = True
            self.flush()
        if not self.will_flush:
            self.flush_soon()

    def flush_soon(self) -> None:
        """Write what is queued at the end of this tick, or of what is handled."""
        if not self.will_flush:
            self.will_flush = True
            self._loop.call_soon(self._flush_now)

    def end_handling(self, *, is_answered: bool = False) -> None:
        """What came is handled: write the answers.

        If there are none, and none has left before, tasks that were woken may have
        something to say: it leaves behind them in the same tick.
        """
        self.will_flush = self._has_begun = False
        if self._outbox.nbytes or self.is_reading_paused or self._when_drained:
            self.flush()
        elif not (is_answered or self._is_last):
            self.will_flush = True
            self._loop.call_soon(self._flush_now)
        if self._when_answered:
            self._tell_answered()

    def call_when_answered(self, fn: Callable[[], None]) -> None:
        """Call ``fn`` once, behind the answers to what is handled now.

        Or behind what leaves at the end of this tick; otherwise on a later one.
        """
        if self.will_flush:
            self._when_answered.append(fn)
        else:
            self._loop.call_soon(fn)

    def flush(self) -> None:
        """Write what is queued, as much as the stream takes."""
        stream, outbox = self._stream, self._outbox
        while outbox.nbytes and not stream.unsent_bytes:
            stream.write(outbox.take(_WRITE_BYTES))
        if self._is_last:
            if not outbox.nbytes:
                stream.finish()
        elif outbox.answer_bytes > self.max_answer_bytes:
            self._pause()
        elif self.is_reading_paused and outbox.answer_bytes <= LOW_BYTES:
            self.max_answer_bytes = MAX_ANSWER_BYTES
            self._read_on()
        if self._when_drained and self.nbytes < LOW_BYTES:
            self.notify_drained()

    def finish(self) -> None:
        """Write what is queued, then end the writing half; read on meanwhile."""
        self._is_last = True
        self.is_reading_paused = False
        self._stream.resume_reading()
        self.flush()

    def stop(self) -> None:
        """Write nothing more."""
        self.is_reading_paused = False
        self._outbox.clear()

    def call_when_drained(self, fn: Callable[[], None]) -> None:
        """Call ``fn`` once less than 1 MiB waits; on a later tick if it is so now."""
        if self.nbytes < LOW_BYTES:
            self._loop.call_soon(fn)
        else:
            self._when_drained.append(fn)

    def notify_drained(self) -> None:
        """Wait no longer: everything has left, or nothing more will."""
        waiting, self._when_drained = self._when_drained, []
        for fn in waiting:
            self._loop.call_soon(fn)

    def judge_reader(self) -> bool:
        """Once a heartbeat: whether the peer takes what it is sent.

        While its bytes are not read, its silence means nothing. Where both
        sides wait for the other to read, one has to give way; for a peer that
        never reads that happens twice, and then never again.
        """
        sent, self._sent_before = self._sent_before, self._stream.sent_bytes
        if not self.is_reading_paused or sent != self._sent_before:
            return True
        if self.max_answer_bytes < _MAX_STUCK_ANSWER_BYTES:
            self.max_answer_bytes *= 2
            self._read_on()
        return False

    def _flush_now(self) -> None:
        self.will_flush = self._has_begun = False
        if self._outbox.nbytes or self.is_reading_paused or self._when_drained:
            self.flush()
        elif self._is_last:
            self.flush()
        if self._when_answered:
            self._tell_answered()

    def _tell_answered(self) -> None:
        while self._when_answered:
            self._when_answered.popleft()()

    def _pause(self) -> None:
        self.is_reading_paused = True
        self._stream.pause_reading()

    def _read_on(self) -> None:
        self.is_reading_paused = False
        self._loop.call_soon(self._tell_to_read_on)
