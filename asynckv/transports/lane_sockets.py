"""The socket of a payload lane: plain or TLS, shared by the threads that use it.

What a thread has to say goes to a :class:`LaneOwner`, from that thread.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Final, Protocol

from asynckv.errors import AsyncKVError
from asynckv.security.tls_socket import Connection
from asynckv.transports.lane_wires import wire_over
from asynckv.transports.parts import Part
from asynckv.transports.vectors import rest_of, vectors_of

__all__ = ("DEAD_S", "LaneOwner", "LaneSocket")

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
