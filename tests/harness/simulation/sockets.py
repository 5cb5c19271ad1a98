"""Sockets without a kernel: the part of the socket API that links and lanes use.

A non-blocking call says ``BlockingIOError`` as a real one does; a blocking one
parks its thread, and in an event loop it is an error of the caller.
"""

from __future__ import annotations

import collections
import errno
import os
import socket
from collections.abc import Iterable
from functools import partial
from typing import Any, Final, Protocol, Self

from harness.simulation.threads import ThreadHost, park_until
from harness.simulation.wires import Wire

__all__ = ("SimulatedSocket", "SocketHost")

_Address = tuple[str, int]
_USER_TIMEOUT: Final = getattr(socket, "TCP_USER_TIMEOUT", 18)


class SocketHost(ThreadHost, Protocol):
    """The node that a socket belongs to."""

    host: str
    files: dict[int, SimulatedSocket]

    def poke(self) -> None:
        """Something has arrived, or there is room again."""

    def open_file(self, sock: SimulatedSocket) -> int:
        """Return the lowest free descriptor, which is ``sock`` from now on."""

    def close_file(self, fd: int) -> None:
        """Let the descriptor be used again."""

    def bind(self, sock: SimulatedSocket, address: _Address) -> _Address:
        """Let ``sock`` have an address; port 0 takes a free one."""

    def unbind(self, sock: SimulatedSocket) -> None:
        """Nobody listens there any more."""

    def dial(self, sock: SimulatedSocket, address: _Address) -> None:
        """Begin to connect; ``receive_open`` or ``receive_reset`` follows."""


class SimulatedSocket:
    """Stands for :class:`socket.socket` in a simulated node."""

    proto = 0

    def __init__(
        self,
        node: SocketHost,
        family: int = socket.AF_INET,
        type: int = socket.SOCK_STREAM,
        *,
        is_accepted: bool = False,
    ) -> None:
        if (family, type) != (socket.AF_INET, socket.SOCK_STREAM):
            raise OSError(errno.EAFNOSUPPORT, "only TCP over IPv4 is simulated")
        self.family, self.type = socket.AF_INET, socket.SOCK_STREAM
        self.backlog: collections.deque[SimulatedSocket] = collections.deque()
        self.outgoing: Wire | None = None
        self.incoming: Wire | None = None
        self.is_listening = False
        self.is_vanished = False
        """Its machine lost power: not even its kernel answers."""
        self.own_address: _Address = (node.host, 0)
        self.peer_address: _Address = ("", 0)
        self._node = node
        self._timeout: float | None = None
        self._give_up_s: float | None = None
        self._asks = False
        self._inbox = bytearray()
        self._has_ended = False
        self._sends_no_more = False
        self._error = 0
        self._is_connecting = False
        self._is_closed = False
        self._fd = -1 if is_accepted else node.open_file(self)

    @property
    def is_in_use(self) -> bool:
        """Whether an application has it open."""
        return not self._is_closed and self._fd >= 0

    # What a selector asks.

    @property
    def is_readable(self) -> bool:
        if self.is_listening:
            return bool(self.backlog)
        return bool(self._inbox) or self._has_ended or bool(self._error)

    @property
    def is_writable(self) -> bool:
        if self._is_connecting:
            return False
        if self._error or self.outgoing is None or self._sends_no_more:
            return True
        return self.outgoing.room > 0

    # What arrives.

    def receive_open(self) -> None:
        self._node.poke()
        if self._is_closed:
            self._answer_with_reset()
        else:
            self._is_connecting = False

    def receive_bytes(self, data: bytes) -> bool:
        if self.is_vanished:
            return True  # nobody says that they came
        if self._is_closed or self._error:
            self._answer_with_reset()
            return False
        self._inbox += data
        self._node.poke()
        return True

    def receive_end(self) -> None:
        self._node.poke()
        self._has_ended = True

    def receive_reset(self) -> None:
        self._node.poke()
        if self._is_closed:
            return
        refused = self._is_connecting
        self._error = errno.ECONNREFUSED if refused else errno.ECONNRESET
        self._is_connecting = False
        self._has_ended = True

    def receive_silence(self) -> None:
        if not self._is_closed:
            self._give_up()

    def plug(self, outgoing: Wire, incoming: Wire, peer: _Address) -> None:
        """These are its two wires."""
        outgoing.on_given_up = self._give_up
        outgoing.on_room = self._node.poke
        self.outgoing, self.incoming, self.peer_address = outgoing, incoming, peer
        incoming.receiver = self
        self._tell_wires()

    @property
    def is_connecting(self) -> bool:
        """Whether anybody still waits for the connection."""
        return self._is_connecting and not self._is_closed

    def accepted(self) -> SimulatedSocket:
        """Return the listener's end of a new connection."""
        sock = SimulatedSocket(self._node, is_accepted=True)
        sock.own_address = self.own_address
        self._node.poke()
        return sock

    # The API of a socket.

    def fileno(self) -> int:
        return self._fd

    def setblocking(self, flag: bool) -> None:
        self._timeout = None if flag else 0.0

    def settimeout(self, value: float | None) -> None:
        self._timeout = value

    def gettimeout(self) -> float | None:
        return self._timeout

    def setsockopt(self, level: int, option: int, value: Any) -> None:
        """Both that matter here: see ``tcp(7)`` for what they do together."""
        if (level, option) == (socket.IPPROTO_TCP, _USER_TIMEOUT):
            self._give_up_s = value / 1000
        elif (level, option) == (socket.SOL_SOCKET, socket.SO_KEEPALIVE):
            self._asks = bool(value)
        self._tell_wires()

    def getsockopt(self, level: int, option: int, size: int = 0) -> int:
        if (level, option) != (socket.SOL_SOCKET, socket.SO_ERROR):
            return 0
        error, self._error = self._error, 0
        return error

    def getsockname(self) -> _Address:
        return self.own_address

    def getpeername(self) -> _Address:
        return self.peer_address

    def bind(self, address: _Address) -> None:
        self.own_address = self._node.bind(self, address)

    def listen(self, backlog: int = 0) -> None:
        self.is_listening = True

    def accept(self) -> tuple[SimulatedSocket, _Address]:
        self._check_open()
        if not self.backlog:
            raise BlockingIOError(errno.EAGAIN, "nobody has connected")
        sock = self.backlog.popleft()
        sock._fd = self._node.open_file(sock)
        return sock, sock.peer_address

    def connect(self, address: _Address) -> None:
        self._check_open()
        self._is_connecting = True
        self._node.dial(self, address)
        raise BlockingIOError(errno.EINPROGRESS, "connecting")

    def send(self, data: Any, flags: int = 0) -> int:
        view = memoryview(data).cast("B")
        self._wait(lambda: self.is_writable)
        self._check_open()
        if self._error:
            raise OSError(self._error, os.strerror(self._error))
        if self._sends_no_more or self.outgoing is None:
            raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))
        sent = self.outgoing.send(view)
        if not sent and len(view):
            raise BlockingIOError(errno.EAGAIN, "the buffer is full")
        return sent

    def sendmsg(self, buffers: Iterable[Any]) -> int:
        return self.send(b"".join(buffers))

    def recv(self, nbytes: int, flags: int = 0) -> bytes:
        self._wait(lambda: self.is_readable)
        self._check_open()
        if not self._inbox:
            if self._error:
                raise OSError(self._error, os.strerror(self._error))
            if self._has_ended:
                return b""
            raise BlockingIOError(errno.EAGAIN, "nothing has come")
        data = bytes(self._inbox[:nbytes])
        if flags & socket.MSG_PEEK:
            return data
        del self._inbox[:nbytes]
        if self.incoming is not None:
            self.incoming.was_read(len(data))
        return data

    def recv_into(self, buffer: Any, nbytes: int = 0, flags: int = 0) -> int:
        view = memoryview(buffer).cast("B")
        view = view[: nbytes or len(view)]
        got = 0
        while got < len(view):
            if flags & socket.MSG_WAITALL:
                self._wait(partial(self._has_much, len(view) - got))
            try:
                data = self.recv(len(view) - got)
            except OSError:
                if got:
                    break
                raise
            view[got : got + len(data)] = data
            got += len(data)
            if not data or not flags & socket.MSG_WAITALL:
                break
        return got

    def recvmsg_into(
        self, buffers: Iterable[Any], ancbufsize: int = 0, flags: int = 0
    ) -> tuple[int, list[Any], int, None]:
        """Fill one after the other; what came before an error is counted."""
        got = 0
        for buffer in buffers:
            try:
                count = self.recv_into(buffer, 0, flags)
            except OSError:
                if got:
                    break
                raise
            got += count
            if count < memoryview(buffer).nbytes:
                break
        return got, [], 0, None

    def shutdown(self, how: int) -> None:
        self._check_open()
        if self.outgoing is None:
            raise OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN))
        if how in (socket.SHUT_RD, socket.SHUT_RDWR):
            self._has_ended = True
        if how in (socket.SHUT_WR, socket.SHUT_RDWR):
            self._send_end()

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._node.close_file(self._fd)
        self._fd = -1
        self._node.unbind(self)
        for sock in self.backlog:
            sock.close()
        if self._inbox and self.outgoing is not None:
            self.outgoing.reset()
        else:
            self._send_end()

    def vanish(self, *, silently: bool) -> None:
        """Its process is gone; ``silently``: and its machine with it."""
        self.is_vanished = silently
        self._is_closed = True
        self._node.unbind(self)
        for sock in self.backlog:
            sock.vanish(silently=silently)
        if self.outgoing is not None and not silently:
            self.outgoing.reset()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _send_end(self) -> None:
        if self.outgoing is not None and not self._sends_no_more:
            self.outgoing.end()
        self._sends_no_more = True

    def _has_much(self, nbytes: int) -> bool:
        """Whether all that is wanted is here, or as much as fits in the kernel."""
        if self._has_ended or self._error:
            return True
        full = self.incoming is not None and not self.incoming.room
        return len(self._inbox) >= nbytes or (full and bool(self._inbox))

    def _wait(self, ready: Any) -> None:
        if self._timeout is None:
            park_until(self._node, lambda: self._is_closed or ready())

    def _check_open(self) -> None:
        if self._is_closed:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))

    def _tell_wires(self) -> None:
        if self._give_up_s is None or self.outgoing is None or self.incoming is None:
            return
        self.outgoing.give_up_s = self._give_up_s
        if self._asks:
            self.incoming.ask_for(self._give_up_s)

    def _give_up(self) -> None:
        self._node.poke()
        self._error = self._error or errno.ETIMEDOUT
        self._is_connecting = False
        self._has_ended = True

    def _answer_with_reset(self) -> None:
        if self.outgoing is not None and not self.is_vanished:
            self.outgoing.reset()
