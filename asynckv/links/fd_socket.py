"""A socket of its own for file descriptors, within this host and this user.

Its name is not in the file system, so nothing is left of it whoever is killed. Each
message is one packet: the first is a ticket, which is answered with a descriptor;
what follows is the owner's. Rule of this file: nothing waits but :func:`fetch_file`.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import os
import re
import secrets
import socket
from typing import Final, Protocol

from asynckv.affinity import ProcessBound
from asynckv.errors import AuthError, PeerLost, RemoteProtocolError
from asynckv.links.sockets import check_peer, wait_readable

__all__ = (
    "FdConnection",
    "FdDoor",
    "FdOwner",
    "fetch_file",
    "hang_up",
    "has_fd_sockets",
)

_BACKLOG: Final = 64
_MAX_HALF_OPEN: Final = 64
_PAUSE_S: Final = 0.1
"""For so long nobody is let in when no more files are to be had."""
_TICKET_NBYTES: Final = 16
_TICKET_S: Final = 5.0
_MAX_MESSAGE_NBYTES: Final = 4096
_MESSAGES_A_TICK: Final = 16
_MAX_FDS: Final = 16
_FD_NBYTES: Final = array.array("i").itemsize
_ANSWER: Final = b"file"
_NAME: Final = re.compile(r"\Aasynckv-[0-9a-f]{32}\Z")
"""Nobody can send us to a socket that is not of this kind."""


def has_fd_sockets() -> bool:
    """Does this system have sockets that carry descriptors, without a file?"""
    return hasattr(socket, "SO_PEERCRED") and hasattr(socket, "MSG_CMSG_CLOEXEC")


class FdOwner(Protocol):
    """For whom a ticket was made. Called on the loop; never waits."""

    def fileno(self) -> int:
        """Return the descriptor that is sent for the ticket."""

    def on_connected(self, connection: FdConnection) -> None:
        """The descriptor was sent."""

    def on_message(self, data: bytes) -> None:
        """The other side says something."""

    def on_end(self) -> None:
        """The other side is gone, as the kernel says, or was hung up on."""


class FdConnection(ProcessBound):
    """One side that has come. It is heard until it is gone, or closed here."""

    def __init__(self, door: FdDoor, sock: socket.socket) -> None:
        self._own()
        self._door = door
        self._sock = sock
        self._owner: FdOwner | None = None
        self._loop = asyncio.get_running_loop()
        self._deadline = self._loop.call_later(_TICKET_S, self.close)
        self._loop.add_reader(sock, self._read)

    def close(self) -> None:
        """Hang up. The owner is told, once. Never waits."""
        if self._is_copy or self._sock.fileno() < 0:
            return
        self._deadline.cancel()
        self._door.forget(self)
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.remove_reader(self._sock)
        self._sock.close()
        if self._owner is not None:
            self._owner.on_end()

    def _read(self) -> None:
        for _ in range(_MESSAGES_A_TICK):
            try:
                data = self._sock.recv(_MAX_MESSAGE_NBYTES)
            except (BlockingIOError, InterruptedError):
                return
            except OSError:
                data = b""
            if not data:
                self.close()
                return
            if self._owner is None:
                self._on_ticket(data)
            else:
                self._owner.on_message(data)
            if self._sock.fileno() < 0:
                return

    def _on_ticket(self, ticket: bytes) -> None:
        owner = self._door.redeem(ticket)
        if owner is None:
            self.close()
            return
        try:
            socket.send_fds(self._sock, [_ANSWER], [owner.fileno()])
        except OSError:  # it is gone, or does not read
            self.close()
            return
        self._deadline.cancel()
        self._door.forget(self)
        self._owner = owner
        owner.on_connected(self)


class FdDoor(ProcessBound):
    """Where sides of this user come with tickets that :meth:`admit` has made.

    ``address`` names it to whoever runs on this host. Belongs to the running loop.

    :raises OSError: the process may have no more files
    """

    def __init__(self) -> None:
        self._own()
        self.address = f"asynckv-{secrets.token_hex(16)}"
        self._tickets: dict[bytes, FdOwner] = {}
        self._half_open: dict[FdConnection, None] = {}
        self._loop = asyncio.get_running_loop()
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._sock.setblocking(False)
            self._sock.bind(f"\0{self.address}")
            self._sock.listen(_BACKLOG)
        except BaseException:
            self._sock.close()
            raise
        self._loop.add_reader(self._sock, self._accept)

    def admit(self, owner: FdOwner) -> bytes:
        """Return a ticket for one connection, good until :meth:`expel`."""
        ticket = secrets.token_bytes(_TICKET_NBYTES)
        self._tickets[ticket] = owner
        return ticket

    def expel(self, ticket: bytes) -> None:
        """That ticket is good no more."""
        self._tickets.pop(ticket, None)

    def redeem(self, ticket: bytes) -> FdOwner | None:
        """Return whose ticket it is, once."""
        return self._tickets.pop(ticket, None)

    def forget(self, connection: FdConnection) -> None:
        """It is half open no more."""
        self._half_open.pop(connection, None)

    def close(self) -> None:
        """Let nobody in any more. Who has come stays. Never waits."""
        if self._is_copy or self._sock.fileno() < 0:
            return
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.remove_reader(self._sock)
        self._sock.close()
        for connection in list(self._half_open):
            connection.close()

    def _accept(self) -> None:
        try:
            sock, _ = self._sock.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return  # it has gone again
        except OSError:  # no more files are to be had: it would be called at once
            self._loop.remove_reader(self._sock)
            self._loop.call_later(_PAUSE_S, self._accept_on)
            return
        sock.setblocking(False)
        try:
            check_peer(sock)
        except (AuthError, OSError):
            sock.close()
            return
        if len(self._half_open) >= _MAX_HALF_OPEN:
            next(iter(self._half_open)).close()
        self._half_open[FdConnection(self, sock)] = None

    def _accept_on(self) -> None:
        if self._sock.fileno() >= 0:
            self._loop.add_reader(self._sock, self._accept)


def hang_up(sock: socket.socket) -> None:
    """Tell the peer: a forked child has the socket too, so closing it says nothing."""
    with contextlib.suppress(OSError):  # the peer has hung up
        sock.shutdown(socket.SHUT_RDWR)
    sock.close()


async def fetch_file(address: str, ticket: bytes) -> tuple[socket.socket, int]:
    """Return the connection, and the descriptor that the ticket was good for.

    Both are the caller's to close. Bounded by the caller's deadline; a cancelled
    call leaves nothing behind.

    :raises PeerLost: nobody is there, or it hung up
    :raises AuthError: it is another user's
    :raises RemoteProtocolError: that is no place for a ticket, or no descriptor came
    """
    if not _NAME.match(address):
        raise RemoteProtocolError("no place to ask for a file")
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        sock.setblocking(False)
        sock.connect(f"\0{address}")
        check_peer(sock)
        sock.send(ticket)
        await wait_readable(sock)
        return sock, _receive_fd(sock)
    except OSError as exc:
        sock.close()
        raise PeerLost(f"no file was to be had: {exc}") from exc
    except BaseException:
        sock.close()
        raise


def _receive_fd(sock: socket.socket) -> int:
    space = socket.CMSG_SPACE(_MAX_FDS * _FD_NBYTES)
    data, messages, flags, _ = sock.recvmsg(
        _MAX_MESSAGE_NBYTES, space, socket.MSG_CMSG_CLOEXEC
    )
    fds = array.array("i")
    for level, kind, content in messages:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(content[: len(content) // _FD_NBYTES * _FD_NBYTES])
    is_right = data == _ANSWER and len(fds) == 1 and not flags & socket.MSG_CTRUNC
    for fd in fds[1 if is_right else 0 :]:
        os.close(fd)
    if not is_right:
        raise RemoteProtocolError(f"{len(fds)} descriptors came for one ticket")
    return fds[0]
