"""Whole pieces over a lane's connection, plain or TLS, for threads that may wait.

A thread that waits is woken by ``shutdown()`` of the socket.
"""

from __future__ import annotations

import select
import socket
from typing import Final, Protocol

from asynckv.security.tls_socket import Connection, TlsSocket, WantsToWrite

__all__ = ("LaneWire", "PlainWire", "TlsWire", "wire_over")

_RECORD_BYTES: Final = 16 * 1024
_WRITE_BYTES: Final = 256 * 1024
"""As much is enciphered at a time; the other direction has its turn after it."""


class LaneWire(Protocol):
    """What the threads of a lane do with its connection."""

    def send(self, header: bytes, piece: memoryview) -> None:
        """Send both, whole.

        :raises OSError: the peer is gone, or the lane was shut down
        """

    def receive_some(self, into: memoryview) -> int:
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

    def send(self, header: bytes, piece: memoryview) -> None:
        sent = self._sock.sendmsg([header, piece])
        while sent < len(header):
            sent += self._sock.sendmsg([header[sent:], piece])
        sent -= len(header)
        while sent < piece.nbytes:
            sent += self._sock.send(piece[sent:])

    def receive_some(self, into: memoryview) -> int:
        return self._sock.recv_into(into, 0, socket.MSG_WAITALL)


class TlsWire(LaneWire):
    """Over TLS: what would block is waited for outside of it, by ``poll``."""

    def __init__(self, sock: TlsSocket) -> None:
        self._sock = sock
        self._readable, self._writable = select.poll(), select.poll()
        self._also_writable = select.poll()
        self._readable.register(sock, select.POLLIN)
        self._writable.register(sock, select.POLLOUT)
        self._also_writable.register(sock, select.POLLOUT)

    def send(self, header: bytes, piece: memoryview) -> None:
        if len(header) + piece.nbytes <= _RECORD_BYTES:
            self._send(memoryview(header + piece))
            return
        self._send(memoryview(header))
        for start in range(0, piece.nbytes, _WRITE_BYTES):
            self._send(piece[start : start + _WRITE_BYTES])

    def receive_some(self, into: memoryview) -> int:
        while True:
            try:
                return self._sock.recv_into(into)
            except WantsToWrite:
                self._also_writable.poll()
            except BlockingIOError:
                self._readable.poll()

    def _send(self, data: memoryview) -> None:
        while True:
            try:
                self._sock.send(data)
                return
            except BlockingIOError:
                self._writable.poll()
