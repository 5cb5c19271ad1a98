from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import stat
from pathlib import Path

import pytest

from asynckv.errors import AuthError, ConfigError, PeerLost, RemoteProtocolError
from asynckv.links import sockets
from asynckv.links.address import Address, parse_url
from asynckv.links.sockets import (
    bind,
    check_peer,
    connect,
    hang_up,
    prepare,
    read_first_frame,
    remove_place,
    send_first_frame,
)
from asynckv.protocol.codec import encode_frame
from asynckv.protocol.frames import Get, Hello
from asynckv.protocol.values import Limits, PeerIdentity
from asynckv.protocol.wire import TYPE_CONTROL, pack_header
from asynckv.testing.blocked import until_blocked

pytestmark = pytest.mark.both_loops

LOOPBACK = parse_url("tcp://127.0.0.1:0")


def port_of(listener: socket.socket) -> Address:
    return parse_url(f"tcp://127.0.0.1:{listener.getsockname()[1]}")


def pair() -> tuple[socket.socket, socket.socket]:
    one, two = socket.socketpair()
    one.setblocking(False)
    two.setblocking(False)
    return one, two


async def test_a_connection_reaches_its_listener_without_delay() -> None:
    with bind(LOOPBACK) as listener:
        with await connect(port_of(listener)) as sock:
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            assert not sock.getblocking()
            listener.accept()[0].close()


async def test_a_listener_is_at_loopback_unless_told_otherwise() -> None:
    with bind(parse_url("tcp://:0")) as listener:
        assert listener.getsockname()[0] == "127.0.0.1"


async def test_nobody_there_says_so_and_what_to_do() -> None:
    with bind(LOOPBACK) as listener:
        address = port_of(listener)
    with pytest.raises(PeerLost, match="nobody listens.*start the other side"):
        await connect(address)


async def test_no_socket_file_says_so(tmp_path: Path) -> None:
    with pytest.raises(PeerLost, match="nobody listens"):
        await connect(parse_url(f"unix://{tmp_path}/none.sock"))


async def test_an_unknown_host_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*args: object, **kwargs: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(PeerLost, match="'nowhere' is no host"):
        await connect(parse_url("tcp://nowhere:1"))


async def test_a_port_in_use_says_so() -> None:
    with bind(LOOPBACK) as listener, pytest.raises(ConfigError, match="Port 0"):
        bind(port_of(listener))


async def test_a_folder_that_is_missing_is_to_be_made(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="make the folder first"):
        bind(parse_url(f"unix://{tmp_path}/none/a.sock"))


async def test_a_socket_file_is_for_its_owner_only(tmp_path: Path) -> None:
    address = parse_url(f"unix://{tmp_path}/a.sock")
    with bind(address):
        mode = os.stat(address.place).st_mode
    assert stat.S_ISSOCK(mode)
    assert stat.S_IMODE(mode) == 0o600


async def test_a_stale_socket_file_is_replaced(tmp_path: Path) -> None:
    address = parse_url(f"unix://{tmp_path}/a.sock")
    bind(address).close()
    with bind(address), await connect(address):
        pass


async def test_a_socket_file_in_use_is_left_alone(tmp_path: Path) -> None:
    address = parse_url(f"unix://{tmp_path}/a.sock")
    with bind(address):
        with pytest.raises(ConfigError):
            bind(address)
        (await connect(address)).close()


async def test_a_place_that_another_took_meanwhile_is_left_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = parse_url(f"unix://{tmp_path}/a.sock")
    with contextlib.ExitStack() as stack, monkeypatch.context() as patch:
        real = socket.socket.listen

        def listen(sock: socket.socket, backlog: int) -> None:
            patch.undo()
            stack.enter_context(bind(address))  # ours is bound, and takes no one yet
            real(sock, backlog)

        patch.setattr(socket.socket, "listen", listen)
        with pytest.raises(ConfigError, match="another process"):
            bind(address)
        (await connect(address)).close()


async def test_a_file_that_is_no_socket_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "a.sock").write_text("precious")
    with pytest.raises(ConfigError):
        bind(parse_url(f"unix://{tmp_path}/a.sock"))
    assert (tmp_path / "a.sock").read_text() == "precious"


async def test_another_listeners_socket_file_is_not_removed(tmp_path: Path) -> None:
    path = tmp_path / "a.sock"
    with bind(parse_url(f"unix://{path}")):
        remove_place(str(path), inode=1)
        assert path.exists()
        remove_place(str(path), path.stat().st_ino)
        assert not path.exists()


async def test_another_user_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = pair()
    with one, two:
        check_peer(one)
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
        with pytest.raises(AuthError, match="another user"):
            check_peer(one)


async def test_a_first_frame_is_read_to_its_end_and_no_further() -> None:
    one, two = pair()
    with one, two:
        hello = Hello(1, 0, PeerIdentity("a", "1"), Limits(), ("inline",), 1)
        await send_first_frame(one, encode_frame(0, hello)[0] + b"rest")
        assert await read_first_frame(two) == hello
        assert two.recv(100) == b"rest"


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", RemoteProtocolError),
        (pack_header(TYPE_CONTROL, 4097, 0), RemoteProtocolError),
        (pack_header(TYPE_CONTROL, 10, 1), RemoteProtocolError),
        (encode_frame(0, Get("k"))[0][:-1], PeerLost),
        (b"", PeerLost),
    ],
)
async def test_a_stranger_that_makes_no_sense_is_refused(
    data: bytes, error: type[Exception]
) -> None:
    one, two = pair()
    with two:
        with one:
            one.send(data)
        with pytest.raises(error):
            await read_first_frame(two)


async def test_a_hang_up_while_sending_is_a_lost_peer() -> None:
    one, two = pair()
    with one:
        two.close()
        with pytest.raises(PeerLost, match="broke in the handshake"):
            await send_first_frame(one, b"x")


async def test_hanging_up_waits_a_moment_for_one_that_still_talks() -> None:
    one, two = pair()
    with one, two:
        two.send(b"still talking")
        task = asyncio.create_task(hang_up(one))
        await until_blocked(task)
        assert two.recv(1) == b""
        two.close()
        await task
        assert one.fileno() >= 0


async def test_hanging_up_waits_half_a_second_for_one_that_never_ends() -> None:
    one, two = pair()
    with one, two:
        async with asyncio.timeout(1.5):
            await hang_up(one)
        one.close()
        await hang_up(one)


async def test_hanging_up_takes_no_more_than_64_kib(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sockets, "_LINGER_BYTES", 10)
    one, two = pair()
    with one, two:
        two.send(bytes(20))
        await hang_up(one)


async def test_a_cancelled_connect_leaves_no_socket() -> None:
    with bind(LOOPBACK) as listener:
        for ticks in range(4):
            task = asyncio.create_task(connect(port_of(listener)))
            for _ in range(ticks):
                await asyncio.sleep(0)
            task.cancel()
            for outcome in await asyncio.gather(task, return_exceptions=True):
                if isinstance(outcome, socket.socket):
                    outcome.close()


async def test_preparing_a_unix_socket_sets_no_tcp_option() -> None:
    one, two = socket.socketpair()
    with one, two:
        prepare(one)
        assert not one.getblocking()
