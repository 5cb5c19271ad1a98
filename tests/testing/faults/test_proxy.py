from __future__ import annotations

import asyncio
import inspect
import os
import socket
from pathlib import Path
from typing import Any

import pytest
import torch

import asynckv
from asynckv.errors import ConfigError
from asynckv.testing import Authority, faults, use_across_tasks
from asynckv.testing.blocked import until
from asynckv.testing.faults.hostile import RawConnection, RawListener
from asynckv.testing.faults.places import place_of
from asynckv.testing.faults.proxy import Proxy
from asynckv.testing.pairs import Scheme, new_url, open_kv_faults


@pytest.mark.parametrize("scheme", ["tcp", "unix"])
async def test_a_link_works_through_a_proxy(scheme: Scheme) -> None:
    tensor = torch.arange(2**20, dtype=torch.uint8)
    async with (
        asynckv.listen_pipe(new_url(scheme), lanes=2) as listener,
        Proxy(listener.url) as proxy,
        asynckv.open_pipe(proxy.url, lanes=2) as near,
        await listener.accept() as far,
    ):
        await near.send_tensor(tensor)
        came = await far.recv_tensor()
    assert came is not None
    assert torch.equal(came, tensor)
    assert (proxy.counts.control, proxy.counts.lanes) == (1, 2)
    assert proxy.counts.bytes_to_listener > tensor.nbytes


async def test_nobody_behind_it_is_a_reset() -> None:
    with RawListener() as listener:
        url = listener.url
    async with Proxy(url) as proxy:
        with await RawConnection.dial(proxy.url) as near:
            with pytest.raises(ConnectionResetError):
                await near.receive(1)
        assert proxy.counts.connections == 0


async def test_leaving_it_resets_what_is_open(listener: RawListener) -> None:
    async with Proxy(listener.url) as proxy:
        near = await RawConnection.dial(proxy.url)
        far = await listener.accept()
        await until(lambda: proxy.open_connections == 1)
    with near, pytest.raises(ConnectionResetError):
        await near.receive(1)
    with pytest.raises(ConnectionResetError):
        await far.receive(1)
    with pytest.raises(ConnectionRefusedError):
        await RawConnection.dial(proxy.url)
    await proxy.aclose()


async def test_leaving_it_at_once_leaves_nothing(listener: RawListener) -> None:
    for turns in range(4):
        async with Proxy(listener.url) as proxy:
            with await RawConnection.dial(proxy.url):
                for _ in range(turns):
                    await asyncio.sleep(0)
    proxy.abort()


async def test_a_unix_proxy_leaves_no_file(tmp_path: Path) -> None:
    async with (
        asynckv.listen_pipe(f"unix://{tmp_path}/pipe") as listener,
        Proxy(listener.url) as proxy,
    ):
        place = proxy.url.removeprefix("unix://").split("?")[0]
        os.stat(place)
    with pytest.raises(FileNotFoundError):
        os.stat(os.path.dirname(place))


async def test_it_is_entered_once(listener: RawListener) -> None:
    proxy = Proxy(listener.url)
    with pytest.raises(RuntimeError, match="before it is entered"):
        _ = proxy.url
    async with proxy:
        with pytest.raises(RuntimeError, match="make a new one"):
            await proxy.__aenter__()


async def test_it_is_left_in_another_task(listener: RawListener) -> None:
    await use_across_tasks(Proxy(listener.url))


async def test_a_quick_heartbeat_is_agreed_on() -> None:
    async with (
        asynckv.listen_pipe("tcp://127.0.0.1:0") as listener,
        Proxy(listener.url, heartbeat_ms=60) as proxy,
        asynckv.open_pipe(proxy.url) as near,
        await listener.accept() as far,
    ):
        with proxy.black_hole() as fault:
            async with asyncio.timeout(5):
                with pytest.raises(asynckv.PeerLost, match="3 heartbeats of 0.06 s"):
                    await near.recv_tensor()
                with pytest.raises(asynckv.PeerLost, match="3 heartbeats of 0.06 s"):
                    await far.recv_tensor()
    assert fault.counts.nbytes
    await until(lambda: not proxy.open_connections)


@pytest.fixture
def tls(tmp_path: Path) -> asynckv.TLS:
    return Authority(tmp_path).issue()


async def test_a_tls_link_works_through_a_proxy_that_cannot_look_into_it(
    tls: asynckv.TLS,
) -> None:
    tensor = torch.arange(2**18, dtype=torch.uint8)
    async with (
        asyncio.timeout(20),
        asynckv.listen_pipe("tls://127.0.0.1:0", tls=tls, lanes=2) as listener,
        Proxy(listener.url, heartbeat_ms=10) as proxy,
        asynckv.open_pipe(proxy.url, tls=tls, lanes=2) as near,
        await listener.accept() as far,
    ):
        with proxy.tiny_slices(1000) as fault, proxy.reset(kind="control"):
            await near.send_tensor(tensor)
            came = await far.recv_tensor()
            assert came is not None
            assert torch.equal(came, tensor)
        assert fault.counts.nbytes > tensor.nbytes
    assert (proxy.counts.control, proxy.counts.lanes) == (0, 0)


async def test_a_peer_that_dials_again_finds_the_next_server() -> None:
    async with (
        asyncio.timeout(20),
        open_kv_faults() as old,
        asynckv.LookupBuffer("1MiB", drain_s=0) as lookup,
        asynckv.serve("tcp://127.0.0.1:0", lookup=lookup) as new,
    ):
        incarnation = old.peer.incarnation
        waiting = asyncio.create_task(old.peer.lookup.drop_select([1]))
        await until(lambda: old.lookup.statistics().waiting_selects == 1)
        old.proxy.target = new.url
        with old.reset() as fault:
            await fault.acted()
        await lookup.insert([1], None, torch.ones(3), None, None)
        assert (await waiting).nbytes == 20
        assert old.peer.incarnation != incarnation


ON_FROM_THE_START: dict[str, dict[str, Any]] = {
    "latency": {"delay_s": 0.01},
    "rate": {"bytes_per_s": 10_000},
    "tiny_slices": {},
    "cut_after": {"nbytes": 10},
    "bit_flip": {"at": 10},
}


AT_THE_BEGIN = ("stall", "black_hole", "reset", "half_close")


@pytest.mark.parametrize("name", ON_FROM_THE_START)
async def test_what_shapes_or_damages_is_on_from_the_start(
    listener: RawListener, name: str
) -> None:
    async with getattr(faults, name)(listener.url, **ON_FROM_THE_START[name]) as fault:
        assert fault.is_on
        with await RawConnection.dial(fault.url) as near:
            far = await listener.accept()
            await near.send(bytes(20))
            await far.receive(10)
            await fault.acted()


@pytest.mark.parametrize("name", AT_THE_BEGIN)
async def test_what_ends_or_holds_waits_for_its_begin(
    listener: RawListener, name: str
) -> None:
    async with getattr(faults, name)(listener.url) as fault:
        with await RawConnection.dial(fault.url) as near:
            far = await listener.accept()
            await near.send(b"before")
            assert await far.receive(6) == b"before"
            fault.begin()
            near.send_nowait(b"after")
            await fault.acted()


def test_every_fault_has_its_function() -> None:
    names = {name for name in faults.__all__ if name.islower()} - {"frozen_peer"}
    assert names == {*ON_FROM_THE_START, *AT_THE_BEGIN}
    for name in names:
        function, method = getattr(faults, name), getattr(Proxy, name)
        assert (function.__name__, function.__doc__) == (name, method.__doc__)
        assert inspect.isfunction(function)


@pytest.mark.parametrize(
    "url", ["mem://here", "tcp://127.0.0.1", "unix://", "http://x:1", "nonsense"]
)
def test_where_no_proxy_can_stand(url: str) -> None:
    with pytest.raises(ConfigError, match="no proxy can stand"):
        place_of(url)


def test_a_url_says_where_to_dial() -> None:
    assert place_of("tcp://[::1]:70").target == ("::1", 70)
    assert place_of("tcp://:70?payload=inline").target == ("127.0.0.1", 70)
    assert place_of("tls://10.0.0.1:7").family == socket.AF_INET
    assert place_of("unix:///run/a%20b").target == "/run/a b"


async def test_the_place_beside_a_tcp_listener_is_a_loopback_port() -> None:
    place, sock = await place_of("tls://10.1.2.3:70").listen_beside()
    with sock, await place_of(place.url).connect() as dialled:
        assert dialled.getpeername() == sock.getsockname()
        assert place.url.startswith("tls://127.0.0.1:")
    await place.remove()


async def test_the_place_beside_a_unix_socket_is_this_users_alone() -> None:
    place, sock = await place_of("unix:///run/asynckv.sock").listen_beside()
    with sock, await place_of(place.url).connect():
        found = os.stat(place.folder)
        assert (found.st_mode & 0o777, found.st_uid) == (0o700, os.geteuid())
    await place.remove()
    with pytest.raises(FileNotFoundError):
        os.stat(place.folder)


async def test_payload_goes_through_the_proxy_unless_the_url_says_how() -> None:
    for url, query in (("tcp://:70", "inline"), ("tcp://:70?payload=x", "x")):
        place, sock = await place_of(url).listen_beside()
        sock.close()
        assert place.url.endswith(f"?payload={query}")
