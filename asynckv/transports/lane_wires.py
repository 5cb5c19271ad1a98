"""Whole pieces over a lane's connection, plain or TLS, for threads that may wait.

A thread that waits is woken by ``shutdown()`` of the socket.
"""

from __future__ import annotations

import select
import socket
from collections.abc import Sequence
from typing import Final, Protocol

from asynckv.security.tls_socket import Connection, TlsSocket, WantsToWrite
from asynckv.transports.vectors import rest_of, vectors_of

__all__ = ("LaneWire", "PlainWire", "TlsWire", "wire_over")

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
