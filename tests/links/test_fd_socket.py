from __future__ import annotations

import array
import asyncio
import errno
import os
import socket
from collections.abc import AsyncIterator, Iterator

import pytest

from asynckv.errors import AuthError, PeerLost, RemoteProtocolError
from asynckv.links import fd_socket
from asynckv.links.fd_socket import FdConnection, FdDoor, fetch_file, has_fd_sockets
from asynckv.testing.blocked import until

pytestmark = [
    pytest.mark.both_loops,
    pytest.mark.skipif(not has_fd_sockets(), reason="no such sockets here"),
]


class Owner:
    """Sends one file, and writes down what it is told."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("test", os.MFD_CLOEXEC)
        self.connection: FdConnection | None = None
        self.heard: list[bytes] = []
        self.ends = 0

    def fileno(self) -> int:
        return self.fd

    def on_connected(self, connection: FdConnection) -> None:
        self.connection = connection

    def on_message(self, data: bytes) -> None:
        self.heard.append(data)

    def on_end(self) -> None:
        self.ends += 1


@pytest.fixture
def owner() -> Iterator[Owner]:
    owner = Owner()
    yield owner
    if owner.connection is not None:
        owner.connection.close()
    os.close(owner.fd)


@pytest.fixture
async def door() -> AsyncIterator[FdDoor]:
    door = FdDoor()
    yield door
    door.close()


def knock(door: FdDoor) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.setblocking(False)
    sock.connect(f"\0{door.address}")
    return sock


async def hung_up(sock: socket.socket) -> bool:
    return await asyncio.get_running_loop().sock_recv(sock, 1) == b""


async def test_a_ticket_is_good_for_one_file(door: FdDoor, owner: Owner) -> None:
    ticket = door.admit(owner)
    sock, fd = await fetch_file(door.address, ticket)
    with sock:
        assert os.fstat(fd).st_ino == os.fstat(owner.fd).st_ino
        assert not os.get_inheritable(fd) and not sock.get_inheritable()
        os.close(fd)
        with pytest.raises((PeerLost, RemoteProtocolError)):
            await fetch_file(door.address, ticket)


@pytest.mark.parametrize("ticket", [b"", b"x" * 16, b"x" * 5000])
async def test_a_wrong_ticket_gets_nothing(
    door: FdDoor, owner: Owner, ticket: bytes
) -> None:
    door.admit(owner)
    with pytest.raises((PeerLost, RemoteProtocolError)):
        await fetch_file(door.address, ticket or b"\0")
    assert owner.connection is None


async def test_an_expelled_ticket_is_good_no_more(door: FdDoor, owner: Owner) -> None:
    ticket = door.admit(owner)
    door.expel(ticket)
    with pytest.raises((PeerLost, RemoteProtocolError)):
        await fetch_file(door.address, ticket)


async def test_the_owner_hears_each_message_and_the_end(
    door: FdDoor, owner: Owner
) -> None:
    sock, fd = await fetch_file(door.address, door.admit(owner))
    os.close(fd)
    with sock:
        for message in (b"one", b"two"):
            sock.send(message)
        await until(lambda: len(owner.heard) == 2)
    await until(lambda: owner.ends == 1)
    assert owner.heard == [b"one", b"two"]


async def test_who_was_let_in_stays_when_the_door_closes(
    door: FdDoor, owner: Owner
) -> None:
    sock, fd = await fetch_file(door.address, door.admit(owner))
    os.close(fd)
    door.close()
    with sock:
        sock.send(b"still here")
        await until(lambda: bool(owner.heard))
        with pytest.raises(PeerLost):
            await fetch_file(door.address, b"x" * 16)


async def test_a_stranger_without_a_ticket_is_hung_up_on(
    monkeypatch: pytest.MonkeyPatch, door: FdDoor
) -> None:
    monkeypatch.setattr(fd_socket, "_TICKET_S", 0.01)
    with knock(door) as sock:
        assert await hung_up(sock)


async def test_the_oldest_of_too_many_strangers_has_to_go(
    monkeypatch: pytest.MonkeyPatch, door: FdDoor
) -> None:
    monkeypatch.setattr(fd_socket, "_MAX_HALF_OPEN", 1)
    with knock(door) as first, knock(door):
        assert await hung_up(first)


async def test_another_user_is_not_let_in(
    monkeypatch: pytest.MonkeyPatch, door: FdDoor, owner: Owner
) -> None:
    def refuse(sock: socket.socket) -> None:
        raise AuthError("another user")

    ticket = door.admit(owner)
    with knock(door) as sock:
        monkeypatch.setattr(fd_socket, "check_peer", refuse)
        assert await hung_up(sock)
        with pytest.raises(AuthError):
            await fetch_file(door.address, ticket)


@pytest.mark.parametrize(
    "address", ["", "/run/dbus", "asynckv-", "asynckv-" + "0" * 31 + "\n"]
)
async def test_nobody_can_send_us_to_another_socket(address: str) -> None:
    with pytest.raises(RemoteProtocolError, match="no place"):
        await fetch_file(address, b"x" * 16)


@pytest.mark.parametrize("count", [0, 2, 40])
async def test_surplus_files_are_closed(
    monkeypatch: pytest.MonkeyPatch, door: FdDoor, owner: Owner, count: int
) -> None:
    def send_many(sock: socket.socket, buffers: list[bytes], fds: list[int]) -> None:
        rights = array.array("i", fds * count)
        control = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)] if count else []
        sock.sendmsg(buffers, control)

    monkeypatch.setattr(socket, "send_fds", send_many)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(RemoteProtocolError, match="descriptors"):
        await fetch_file(door.address, door.admit(owner))
    await until(lambda: owner.connection is not None and owner.ends == 1)
    assert len(os.listdir("/proc/self/fd")) == before


async def test_a_cancelled_fetch_leaves_nothing_open(
    monkeypatch: pytest.MonkeyPatch, door: FdDoor, owner: Owner
) -> None:
    monkeypatch.setattr(door, "redeem", lambda ticket: None)
    monkeypatch.setattr(FdConnection, "close", lambda self: None)
    fetching = asyncio.create_task(fetch_file(door.address, b"x" * 16))
    await until(lambda: bool(door._half_open))
    fetching.cancel()
    with pytest.raises(asyncio.CancelledError):
        await fetching
    monkeypatch.undo()
    for stranger in list(door._half_open):
        stranger.close()


async def test_nobody_is_let_in_while_no_more_files_are_to_be_had(
    door: FdDoor, owner: Owner, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, sock = list[float](), door._sock

    class Full:
        """A socket in a process that has as many files as it may."""

        fileno, close = staticmethod(sock.fileno), staticmethod(sock.close)

        def accept(self) -> tuple[socket.socket, object]:
            calls.append(asyncio.get_running_loop().time())
            if len(calls) < 3:
                raise OSError(errno.EMFILE, "too many open files")
            return sock.accept()

    monkeypatch.setattr(door, "_sock", Full())
    fetched, fd = await fetch_file(door.address, door.admit(owner))
    fetched.close()
    os.close(fd)
    assert len(calls) == 3 and calls[1] - calls[0] > 0.05
