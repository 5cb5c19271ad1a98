"""One connection through a proxy: two sockets, and a flow each way."""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import struct
from collections.abc import Callable, Sequence
from typing import Final, Literal

from asynckv.testing.faults.fault import Fault
from asynckv.testing.faults.flows import Flow
from asynckv.testing.faults.greetings import Greeting

__all__ = ("Passage", "ProxyCounts", "close_with_end", "close_with_reset")

_DISCARD_BYTES: Final = 256 * 1024
_MAX_DISCARDS: Final = 64
_NO_LINGER: Final = struct.pack("ii", 1, 0)


@dataclasses.dataclass
class ProxyCounts:
    """What has passed. ``max_held_bytes``: the most at a time, in one direction."""

    connections: int = 0
    control: int = 0
    lanes: int = 0
    bytes_to_listener: int = 0
    bytes_to_dialler: int = 0
    max_held_bytes: int = 0


class Passage:
    """Carries bytes both ways between two connected sockets, which it owns.

    ``on_over(passage)`` is called once, when both are closed.
    """

    def __init__(
        self,
        near: socket.socket,
        far: socket.socket,
        *,
        number: int,
        faults: Sequence[Fault],
        counts: ProxyCounts,
        on_over: Callable[[Passage], None],
        heartbeat_ms: int | None = None,
    ) -> None:
        self._sockets: tuple[socket.socket, ...] = (near, far)
        self._counts = counts
        self._on_over = on_over
        self._hello = Greeting(heartbeat_ms)
        self._kind_is_counted = False
        answer = Greeting(heartbeat_ms)
        if heartbeat_ms is None:
            answer.rest()  # there is nothing to learn from it
        self._flows = (
            Flow(self, (near, far), "to_listener", number, self._hello, faults),
            Flow(self, (far, near), "to_dialler", number, answer, faults),
        )
        counts.connections += 1

    @property
    def kind(self) -> Literal["control", "lanes", ""]:
        """What the dialler's first frame says it is; empty while that is unknown."""
        return self._hello.kind

    def start(self) -> None:
        """Begin to carry."""
        for flow in self._flows:
            flow.start()

    def wake(self) -> None:
        """Judge anew what is held."""
        for flow in self._flows:
            flow.wake()

    def cut(self, *, resets: bool) -> None:
        """Close both sockets now. Safe to call again."""
        if self._sockets:
            for flow in self._flows:
                flow.stop()
            for sock in self._sockets:
                close_with_reset(sock) if resets else close_with_end(sock)
            self._sockets = ()
            self._on_over(self)

    # What a flow says.

    def flow_is_over(self) -> None:
        """One direction has ended; with the other, the connection has."""
        if all(flow.is_over for flow in self._flows):
            self.cut(resets=False)

    def count(self, flow: Flow, sent: int, held: int) -> None:
        """A flow has sent, and holds, as many bytes."""
        counts = self._counts
        if flow.direction == "to_listener":
            counts.bytes_to_listener += sent
        else:
            counts.bytes_to_dialler += sent
        counts.max_held_bytes = max(counts.max_held_bytes, held)
        if self.kind and not self._kind_is_counted:
            self._kind_is_counted = True
            counts.control += self.kind == "control"
            counts.lanes += self.kind == "lanes"


def close_with_end(sock: socket.socket) -> None:
    """Close ``sock`` by a FIN: with something unread it would be an RST.

    Who goes on sending to it is answered by an RST, as by any closed socket.
    """
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_WR)
        for _ in range(_MAX_DISCARDS):
            if not sock.recv(_DISCARD_BYTES):
                break
    sock.close()


def close_with_reset(sock: socket.socket) -> None:
    """Close ``sock`` by an RST, if it is a TCP one; what it had to send is lost."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
    sock.close()
