"""How two ranks of a communicator hear of each other: within a process, or by a socket.

Nothing here waits. It is called under the lock of the GPUs.
"""

from __future__ import annotations

import collections
import contextlib
import secrets
import socket
import struct
from typing import Final, Protocol, TypeAlias

from asynckv.errors import GPUFailed
from asynckv.transports.nccl.api import UNIQUE_ID_NBYTES

__all__ = ("Meetings", "Wire")

_Line: TypeAlias = collections.deque[bytes]

_PREFIX: Final = struct.Struct("<I")
_PORT: Final = struct.Struct("<H")
_READ_BYTES: Final = 2**20


class Wire(Protocol):
    """Messages to and from the other rank, in order."""

    def tell(self, message: bytes) -> None:
        """Let the other rank hear it, some time."""

    def hear(self) -> list[bytes]:
        """Return what came meanwhile."""

    def close(self) -> None:
        """Say and hear nothing more."""


class Meetings:
    """Where ranks with the same unique id find each other."""

    def __init__(self, *, by_sockets: bool) -> None:
        self._by_sockets = by_sockets
        self._lines: dict[bytes, list[_Line]] = {}
        self._listeners: dict[bytes, socket.socket] = {}

    def unique_id(self) -> bytes:
        """Make a place to meet; as the real one does, it may cost a socket."""
        port = 0
        if self._by_sockets:
            listener = socket.create_server(("127.0.0.1", 0))
            listener.setblocking(False)
            port = listener.getsockname()[1]
        made = _PORT.pack(port) + secrets.token_bytes(UNIQUE_ID_NBYTES - _PORT.size)
        if port:
            self._listeners[made] = listener
        return made

    def join(self, unique_id: bytes, rank: int) -> Wire:
        """Return this rank's end.

        :raises GPUFailed: nobody is there any more
        """
        (port,) = _PORT.unpack_from(unique_id)
        if not port:
            return _NearWire(self._lines, unique_id, rank)
        if listener := self._listeners.pop(unique_id, None):
            return _SocketWire(listener, is_listener=True)
        sock = socket.socket()
        try:
            sock.settimeout(1)
            sock.connect(("127.0.0.1", port))
        except OSError as exc:
            sock.close()
            raise GPUFailed(f"nobody is at that unique id: {exc}", code=2) from exc
        sock.setblocking(False)
        return _SocketWire(sock, is_listener=False)

    def close(self) -> None:
        """Close what nobody has come for."""
        for listener in self._listeners.values():
            listener.close()
        self._listeners.clear()
        self._lines.clear()


class _NearWire:
    def __init__(
        self, lines: dict[bytes, list[_Line]], unique_id: bytes, rank: int
    ) -> None:
        ours = lines.setdefault(unique_id, [collections.deque() for _ in range(2)])
        self._out, self._in = ours[1 - rank], ours[rank]

    def tell(self, message: bytes) -> None:
        self._out.append(message)

    def hear(self) -> list[bytes]:
        # One by one: the other rank may say something meanwhile.
        return [self._in.popleft() for _ in range(len(self._in))]

    def close(self) -> None:
        """Nothing to do: what was said is still heard."""


class _SocketWire:
    def __init__(self, sock: socket.socket, *, is_listener: bool) -> None:
        self._sock = sock
        self._is_listener = is_listener
        self._unsent = bytearray()
        self._unread = bytearray()

    def tell(self, message: bytes) -> None:
        self._unsent += _PREFIX.pack(len(message)) + message
        self._get_on()

    def hear(self) -> list[bytes]:
        self._get_on()
        found = []
        while len(self._unread) >= _PREFIX.size:
            (nbytes,) = _PREFIX.unpack_from(self._unread)
            stop = _PREFIX.size + nbytes
            if len(self._unread) < stop:
                break
            found.append(bytes(self._unread[_PREFIX.size : stop]))
            del self._unread[:stop]
        return found

    def close(self) -> None:
        self._sock.close()

    def _get_on(self) -> None:
        # A peer that is gone is silent, as over shared memory: no error tells of it.
        with contextlib.suppress(OSError):
            if self._is_listener:
                listener = self._sock
                self._sock, _ = listener.accept()
                self._is_listener = False
                listener.close()
                self._sock.setblocking(False)
            while self._unsent and (sent := self._sock.send(self._unsent)):
                del self._unsent[:sent]
        with contextlib.suppress(OSError):
            while not self._is_listener and (data := self._sock.recv(_READ_BYTES)):
                self._unread += data
