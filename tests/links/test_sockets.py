from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import socket
import ssl
import stat
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest

from asynckv.errors import AuthError, ConfigError, PeerLost, RemoteProtocolError
from asynckv.links import sockets
from asynckv.links.address import Address, parse_url
from asynckv.links.sockets import (
    assurance_of,
    bind,
    check_peer,
    connect,
    hang_up,
    in_thread,
    prepare,
    read_first_frame,
    remove_place,
    secure,
    send_first_frame,
    wait_readable,
    wait_writable,
)
from asynckv.protocol.codec import encode_frame
from asynckv.protocol.frames import Get, Hello
from asynckv.protocol.values import Limits, PeerIdentity
from asynckv.protocol.wire import TYPE_CONTROL, pack_header
from asynckv.security.names import NO_ASSURANCE
from asynckv.security.tls import TLS, TlsKeys, read_tls
from asynckv.security.tls_socket import TlsSocket
from asynckv.testing.blocked import until, until_blocked
from asynckv.testing.certificates import Authority

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
    with await bind(LOOPBACK) as listener:
        with await connect(port_of(listener)) as sock:
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            assert not sock.getblocking()
            listener.accept()[0].close()


async def test_a_listener_is_at_loopback_unless_told_otherwise() -> None:
    with await bind(parse_url("tcp://:0")) as listener:
        assert listener.getsockname()[0] == "127.0.0.1"


async def test_nobody_there_says_so_and_what_to_do() -> None:
    with await bind(LOOPBACK) as listener:
        address = port_of(listener)
    with pytest.raises(PeerLost, match="nobody listens.*start the other side"):
        await connect(address)


async def test_no_socket_file_says_so(tmp_path: Path) -> None:
    with pytest.raises(PeerLost, match="nobody listens"):
        await connect(parse_url(f"unix://{tmp_path}/none.sock"))


HOST = "kv.example"


class Names:
    """Looks ``HOST`` up at nobody's, in the thread that asks, once it ``may_end``."""

    def __init__(self, addresses: list[str]) -> None:
        self.may_end = threading.Event()
        self.may_end.set()
        self.asked: list[threading.Thread] = []
        self._addresses = addresses
        self._real = socket.getaddrinfo

    def look_up(self, host: str, port: int, *, type: int) -> list[Any]:
        self.asked.append(threading.current_thread())
        self.may_end.wait()
        if not self._addresses:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [
            found
            for each in self._addresses
            for found in self._real(each, port, type=type)
        ]


@pytest.fixture
def names(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Names:
    names = Names(getattr(request, "param", ["127.0.0.1"]))
    monkeypatch.setattr(socket, "getaddrinfo", names.look_up)
    return names


UNKNOWN = pytest.mark.parametrize("names", [[]], indirect=True)


@UNKNOWN
async def test_an_unknown_host_says_so(names: Names) -> None:
    with pytest.raises(PeerLost, match=f"'{HOST}' is no host"):
        await connect(Address("tcp", host=HOST, port=1))


@UNKNOWN
async def test_nobody_listens_at_an_unknown_host(names: Names) -> None:
    with pytest.raises(ConfigError, match=f"cannot listen at tcp://{HOST}:0"):
        await bind(Address("tcp", host=HOST))


@pytest.mark.parametrize("open_socket", [bind, connect])
async def test_a_host_that_is_looked_up_holds_nothing_up(
    open_socket: Callable[[Address], Awaitable[socket.socket]], names: Names
) -> None:
    names.may_end.clear()
    task = asyncio.ensure_future(open_socket(Address("tcp", host=HOST)))
    await until(lambda: bool(names.asked))
    task.cancel()
    await asyncio.wait({task})
    names.may_end.set()
    assert task.cancelled()
    assert names.asked[0] is not threading.current_thread()


async def test_a_host_is_looked_up_while_an_application_has_all_threads(
    names: Names,
) -> None:
    others = anyio.to_thread.current_default_thread_limiter()
    for _ in range(int(others.total_tokens)):
        others.acquire_on_behalf_of_nowait(object())
    with await bind(Address("tcp", host=HOST)) as listener:
        port = listener.getsockname()[1]
        (await connect(Address("tcp", host=HOST, port=port))).close()


@pytest.mark.parametrize("names", [["::1", "127.0.0.1"]], indirect=True)
async def test_a_listener_is_at_the_address_of_ipv4_that_its_host_has(
    names: Names,
) -> None:
    with await bind(Address("tcp", host=HOST)) as listener:
        assert listener.getsockname()[0] == "127.0.0.1"


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
async def test_a_number_is_looked_up_nowhere(host: str, names: Names) -> None:
    with await bind(Address("tcp", host=host)) as listener:
        port = listener.getsockname()[1]
        (await connect(Address("tcp", host=host, port=port))).close()
    assert names.asked == []


async def test_a_port_in_use_says_so() -> None:
    with await bind(LOOPBACK) as listener, pytest.raises(ConfigError, match="Port 0"):
        await bind(port_of(listener))


async def test_a_folder_that_is_missing_is_to_be_made(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="make the folder first"):
        await bind(parse_url(f"unix://{tmp_path}/none/a.sock"))


async def test_a_socket_file_is_for_its_owner_only(tmp_path: Path) -> None:
    address = parse_url(f"unix://{tmp_path}/a.sock")
    with await bind(address):
        mode = os.stat(address.place).st_mode
    assert stat.S_ISSOCK(mode)
    assert stat.S_IMODE(mode) == 0o600


async def test_a_stale_socket_file_is_replaced(tmp_path: Path) -> None:
    address = parse_url(f"unix://{tmp_path}/a.sock")
    (await bind(address)).close()
    with await bind(address), await connect(address):
        pass


async def test_a_socket_file_in_use_is_left_alone(tmp_path: Path) -> None:
    address = parse_url(f"unix://{tmp_path}/a.sock")
    with await bind(address):
        with pytest.raises(ConfigError):
            await bind(address)
        (await connect(address)).close()


async def test_a_place_that_another_took_meanwhile_is_left_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = parse_url(f"unix://{tmp_path}/a.sock")
    with contextlib.ExitStack() as stack, monkeypatch.context() as patch:
        real = socket.socket.listen

        def listen(sock: socket.socket, backlog: int) -> None:
            patch.undo()
            # Ours takes no one yet, so it looks stale.
            remove_place(address.place, os.lstat(address.place).st_ino)
            other = stack.enter_context(socket.socket(socket.AF_UNIX))
            other.bind(address.place)
            real(other, backlog)
            real(sock, backlog)

        patch.setattr(socket.socket, "listen", listen)
        with pytest.raises(ConfigError, match="another process"):
            await bind(address)
        (await connect(address)).close()


async def test_a_file_that_is_no_socket_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "a.sock").write_text("precious")
    with pytest.raises(ConfigError):
        await bind(parse_url(f"unix://{tmp_path}/a.sock"))
    assert (tmp_path / "a.sock").read_text() == "precious"


async def test_another_listeners_socket_file_is_not_removed(tmp_path: Path) -> None:
    path = tmp_path / "a.sock"
    with await bind(parse_url(f"unix://{path}")):
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
    with await bind(LOOPBACK) as listener:
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


async def test_work_is_done_in_another_thread() -> None:
    assert await in_thread(threading.current_thread) is not threading.current_thread()


async def test_what_it_raises_is_raised() -> None:
    def work() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        await in_thread(work)


async def test_an_error_that_comes_after_a_cancellation_is_dropped() -> None:
    may_end = threading.Event()

    def work() -> None:
        may_end.wait()
        raise ValueError("too late")

    task = asyncio.create_task(in_thread(work))
    await until_blocked(task)
    task.cancel()
    await asyncio.sleep(0)
    may_end.set()
    await asyncio.wait({task})
    assert task.cancelled()


@pytest.mark.parametrize("by_scope", [False, True])
async def test_a_cancellation_is_delivered_once_the_work_is_done(
    by_scope: bool,
) -> None:
    may_end, done = threading.Event(), []
    scope = anyio.CancelScope()

    def work() -> None:
        may_end.wait()
        done.append(True)

    async def run() -> None:
        with scope:
            await in_thread(work)

    task = asyncio.create_task(run())
    await until_blocked(task)
    scope.cancel() if by_scope else task.cancel()
    for _ in range(5):
        await asyncio.sleep(0)
    assert not task.done()
    may_end.set()
    await asyncio.wait({task})
    assert done == [True]
    assert task.cancelled() != by_scope


async def keys_of(tls: TLS, **changes: Any) -> TlsKeys:
    return await in_thread(lambda: read_tls(dataclasses.replace(tls, **changes)))


@contextlib.asynccontextmanager
async def over(near: TlsKeys, far: TlsKeys) -> AsyncIterator[tuple[TlsSocket, ...]]:
    one, two = socket.socketpair()
    with (
        TlsSocket.over(one, near, dials="localhost") as dialling,
        TlsSocket.over(two, far) as listening,
    ):
        yield dialling, listening


async def test_both_sides_know_each_other(authority: Authority) -> None:
    near = await keys_of(authority.issue("localhost", "near"))
    far = await keys_of(authority.issue("localhost", "far"), allowed_peers=("near",))
    async with over(near, far) as (one, two):
        await asyncio.gather(secure(one, near), secure(two, far))
        assert assurance_of(one).binding == assurance_of(two).binding
        names = assurance_of(one).names
        assert names is not None
        assert names.names == ("localhost", "far")


async def test_a_plain_connection_has_no_assurance() -> None:
    with socket.socket() as sock:
        assert assurance_of(sock) == NO_ASSURANCE


async def test_one_that_is_not_allowed_is_refused(authority: Authority) -> None:
    near = await keys_of(authority.issue())
    far = await keys_of(authority.issue(), allowed_peers=("somebody",))
    async with over(near, far) as (one, two):
        results = await asyncio.gather(
            secure(one, near), secure(two, far), return_exceptions=True
        )
    assert results[0] is None
    assert isinstance(results[1], AuthError)


async def test_one_that_speaks_something_else_over_tls_is_refused(
    authority: Authority,
) -> None:
    near, far = await keys_of(authority.issue()), await keys_of(authority.issue())
    other = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    tls = authority.issue()

    def load() -> None:
        other.load_cert_chain(Path(tls.certificate))
        other.load_verify_locations(Path(tls.ca))

    await in_thread(load)
    near = dataclasses.replace(near, dialling=other)
    async with over(near, far) as (one, two):
        for refused in await asyncio.gather(
            secure(one, near), secure(two, far), return_exceptions=True
        ):
            assert isinstance(refused, AuthError)
            assert "no asynckv" in str(refused)


async def test_one_that_hangs_up_is_a_lost_peer(authority: Authority) -> None:
    keys = await keys_of(authority.issue())
    for goodbye in (b"", b"\x16\x03\x01"):
        one, two = socket.socketpair()
        with two, TlsSocket.over(one, keys) as sock:
            two.send(goodbye)
            two.close()
            with pytest.raises(PeerLost):
                await secure(sock, keys)


async def test_waiting_ends_when_the_socket_is_ready() -> None:
    one, two = socket.socketpair()
    with one, two:
        await wait_writable(one)
        task = asyncio.create_task(wait_readable(one))
        await asyncio.sleep(0)
        assert not task.done()
        two.send(b"x")
        await task


@pytest.mark.parametrize("wait", [wait_readable, wait_writable])
async def test_a_cancelled_wait_leaves_no_trace(wait: Any) -> None:
    one, two = socket.socketpair()
    with one, two:
        one.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                one.send(bytes(65536))
        task = asyncio.create_task(wait(one))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait({task})
        assert task.cancelled()
        loop = asyncio.get_running_loop()
        assert not loop.remove_reader(one)
        assert not loop.remove_writer(one)
