"""The other end of the raw baseline: a thread for each connection, which blocks.

Who does not bring the token is hung up on; who does gets constant bytes and the
process's CPU seconds, within fixed bounds of memory.
"""

from __future__ import annotations

import collections
import contextlib
import hmac
import socket
import threading
import time
from collections.abc import Callable, Sequence

import numpy

from asynckv.cli.bench.meeting import (
    MAX_NBYTES,
    ORDER,
    TOKEN_NBYTES,
    What,
    read_order,
)
from asynckv.cli.bench.raw import receive_into
from asynckv.protocol.handshake import MAX_LANES

__all__ = ("RawServer",)

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
