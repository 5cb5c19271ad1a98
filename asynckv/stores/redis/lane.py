"""A lane to one Redis server: a blocking socket, RESP2, and bytes where they stay.

One thread uses it at a time. Nothing is copied: payload leaves from where it lies, and
lands where it is to be. Whoever waits in it looks up every few milliseconds: a lane on
which nothing has moved for too long ends, and so does one that nobody needs any more,
with whatever it was doing. TLS has neither vectors nor ``MSG_WAITALL``; it is read and
written piece by piece.
"""

from __future__ import annotations

import collections
import contextlib
import re
import socket
import ssl
import struct
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Final, TypeAlias

from asynckv.stores.threads import Stopped

__all__ = ("Lane", "NotRedis", "Reply", "ServerError", "command")

_TICK_S: Final = 0.02
_BUFFER_NBYTES: Final = 16 * 1024
_LINE_NBYTES: Final = 64
"""What is read beyond a line is copied once more; so little is, where payload comes."""
_MOST_NBYTES: Final = 2**20
_MOST_PIECES: Final = 64
_MAX_REPLY_NBYTES: Final = 2**20
_NUMBERS: Final = re.compile(rb"(?::\d{1,18}\r\n)+")


class ServerError(Exception):
    """The server has answered with an error; ``code`` is its first word."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.code = text.partition(" ")[0]


class NotRedis(OSError):
    """What the other side says is no answer of a Redis server."""


Reply: TypeAlias = "int | bytes | ServerError | None"


def command(*arguments: bytes | int) -> bytes:
    """Return a command as it is sent."""
    parts = [b"*%d\r\n" % len(arguments)]
    for argument in arguments:
        data = b"%d" % argument if isinstance(argument, int) else argument
        parts.append(b"$%d\r\n%b\r\n" % (len(data), data))
    return b"".join(parts)


class Lane:
    """``sock`` as a lane. It raises OSError when that ends, or moves nothing.

    ``is_stopping`` is asked all the while: then what it does ends with ``Stopped``.
    """

    def __init__(
        self, sock: socket.socket, is_stopping: Callable[[], bool], stall_s: float
    ) -> None:
        self.is_new = True
        """It has not been of use yet."""
        self._sock = sock
        self._is_tls = isinstance(sock, ssl.SSLSocket)
        self._is_stopping = is_stopping
        self._stall_s = stall_s
        self._buffer = bytearray(_BUFFER_NBYTES)
        self._start = self._stop = 0
        if self._is_tls:
            sock.settimeout(_TICK_S)
        else:
            # Not settimeout: that makes it non-blocking, and MSG_WAITALL waits not.
            sock.settimeout(None)
            tick = struct.pack("@ll", 0, int(_TICK_S * 1e6))
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, tick)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, tick)

    def close(self) -> None:
        """End it. Again is nothing. What has not left yet is to leave no more."""
        with contextlib.suppress(OSError):
            linger = struct.pack("@ii", 1, 0)
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            # Of the socket itself: TLS would wait for the peer's goodbye.
            socket.socket.shutdown(self._sock, socket.SHUT_RDWR)
        self._sock.close()

    def send(
        self,
        pieces: Iterable[bytes | memoryview],
        sent: Callable[[int], None] = lambda nbytes: None,
    ) -> None:
        """Send all of ``pieces``, and say how much has left each time."""
        call = self._send_one if self._is_tls else self._sock.sendmsg
        self._move(map(memoryview, pieces), call, sent)

    def read_reply(self, *, line_nbytes: int = _BUFFER_NBYTES) -> Reply:
        """Read an answer that is no payload."""
        line = self._line(line_nbytes)
        kind, text = line[:1], line[1:]
        if kind == b":":
            return _number(text)
        if kind == b"+":
            return text
        if kind == b"-":
            return ServerError(text.decode(errors="replace"))
        if kind != b"$":
            raise NotRedis(f"an answer that begins with {kind!r}")
        nbytes = _number(text)
        if nbytes < 0:
            return None
        if nbytes > _MAX_REPLY_NBYTES:
            raise NotRedis(f"an answer of {nbytes} bytes")
        data = bytearray(nbytes)
        self.read_into([memoryview(data)])
        self.end_payload()
        return bytes(data)

    def read_replies(self, count: int) -> list[Reply]:
        """Read so many answers, which are no payload, of all that were asked for."""
        replies: list[Reply] = []
        while len(replies) < count:
            # Where there are thousands they are numbers.
            some = _NUMBERS.match(self._buffer, self._start, self._stop)
            if some is None:
                replies.append(self.read_reply())
                continue
            self._start = some.end()
            replies += map(int, some.group()[1:-2].split(b"\r\n:"))
        if len(replies) > count:
            raise NotRedis(f"{len(replies)} answers to {count} commands")
        return replies

    def begin_payload(self) -> int:
        """Read how long the payload is that comes now; -1: there is no value.

        :raises ServerError: an error comes instead
        """
        return self._begin(b"$", _LINE_NBYTES)

    def begin_array(self) -> int:
        """Read how many answers come now.

        :raises ServerError: an error comes instead
        """
        return self._begin(b"*", _BUFFER_NBYTES)

    def _begin(self, kind: bytes, line_nbytes: int) -> int:
        line = self._line(line_nbytes)
        if line[:1] == b"-":
            raise ServerError(line[1:].decode(errors="replace"))
        if line[:1] != kind:
            raise NotRedis(f"an answer that begins with {line[:1]!r}")
        return _number(line[1:])

    def read_into(
        self,
        pieces: Iterable[memoryview],
        got: Callable[[int], None] = lambda nbytes: None,
    ) -> None:
        """Read payload until all of ``pieces`` is full, and say how much has come."""
        call = self._read_one if self._is_tls else self._read_some
        self._move(self._drained(pieces, got), call, got)

    def end_payload(self) -> None:
        """Read what follows a payload."""
        if self._line(_LINE_NBYTES):
            raise NotRedis("a payload that is longer than was said")

    def _drained(
        self, pieces: Iterable[memoryview], got: Callable[[int], None]
    ) -> Iterator[memoryview]:
        """Fill ``pieces`` from the buffer as far as that goes; yield what is left."""
        for piece in pieces:
            nbytes = min(self._stop - self._start, len(piece))
            if nbytes:
                end = self._start + nbytes
                piece[:nbytes] = memoryview(self._buffer)[self._start : end]
                self._start = end
                got(nbytes)
            yield piece[nbytes:]

    def _line(self, nbytes: int) -> bytes:
        while True:
            end = self._buffer.find(b"\r\n", self._start, self._stop)
            if end >= 0:
                line = bytes(self._buffer[self._start : end])
                self._start = end + 2
                return line
            self._fill(nbytes)

    def _fill(self, nbytes: int) -> None:
        if self._start:
            left = self._buffer[self._start : self._stop]
            self._start, self._stop = 0, len(left)
            self._buffer[: len(left)] = left
        free = memoryview(self._buffer)[self._stop : self._stop + nbytes]
        if not free:
            raise NotRedis("a line without an end")
        self._stop += self._patiently(lambda: self._sock.recv_into(free))

    def _move(
        self,
        pieces: Iterable[memoryview],
        call: Callable[[list[memoryview]], int],
        moved: Callable[[int], None],
    ) -> None:
        coming = _cut(pieces)
        left: collections.deque[memoryview] = collections.deque()
        nbytes = 0
        while True:
            while nbytes < _MOST_NBYTES and len(left) < _MOST_PIECES:
                piece = next(coming, None)
                if piece is None:
                    break
                left.append(piece)
                nbytes += len(piece)
            if not left:
                return
            some = list(left)
            done = self._patiently(lambda: call(some))  # noqa: B023 - called at once
            moved(done)
            nbytes -= done
            while done and done >= len(left[0]):
                done -= len(left.popleft())
            if done:
                left[0] = left[0][done:]

    def _send_one(self, pieces: list[memoryview]) -> int:
        return self._sock.send(pieces[0])

    def _read_one(self, pieces: list[memoryview]) -> int:
        return self._sock.recv_into(pieces[0])

    def _read_some(self, pieces: list[memoryview]) -> int:
        if len(pieces) == 1:
            piece = pieces[0]
            return self._sock.recv_into(piece, len(piece), socket.MSG_WAITALL)
        return self._sock.recvmsg_into(pieces, 0, socket.MSG_WAITALL)[0]

    def _patiently(self, call: Callable[[], int]) -> int:
        """Make a call until something has moved."""
        began_s = time.monotonic()
        while True:
            if self._is_stopping():
                raise Stopped
            try:
                moved = call()
            except (BlockingIOError, TimeoutError):
                if time.monotonic() - began_s > self._stall_s:
                    raise TimeoutError("nothing has moved") from None
                continue
            if not moved:
                raise ConnectionResetError("the server has ended the connection")
            return moved


def _cut(pieces: Iterable[memoryview]) -> Iterator[memoryview]:
    for piece in pieces:
        for start in range(0, len(piece), _MOST_NBYTES):
            yield piece[start : start + _MOST_NBYTES]


def _number(text: bytes) -> int:
    try:
        return int(text)
    except ValueError:
        raise NotRedis(f"an answer with {text[:32]!r} for a number") from None
