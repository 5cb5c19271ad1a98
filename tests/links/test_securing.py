from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import socket
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from asynckv.errors import AuthError, PeerLost
from asynckv.links.sockets import (
    assurance_of,
    in_thread,
    secure,
    wait_readable,
    wait_writable,
)
from asynckv.security.names import NO_ASSURANCE
from asynckv.security.tls import TLS, TlsKeys, read_tls
from asynckv.security.tls_socket import TlsSocket
from asynckv.testing.certificates import Authority

pytestmark = pytest.mark.both_loops


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
