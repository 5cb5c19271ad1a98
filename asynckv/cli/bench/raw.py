"""The baseline: one blocking TCP socket to the other process, and no protocol.

Everything in this file blocks; the bench calls it in a thread of its own.
"""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Sequence

from asynckv.cli.bench.meeting import ORDER, PING_NBYTES, What

__all__ = ("RawConnection", "receive_into")

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
