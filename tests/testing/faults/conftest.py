"""Plain sockets on both sides of a proxy."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from asynckv.protocol.codec import encode_frame
from asynckv.protocol.frames import Attach, Hello
from asynckv.protocol.values import Limits, PeerIdentity
from asynckv.testing.blocked import until
from asynckv.testing.faults.hostile import RawConnection, RawListener
from asynckv.testing.faults.proxy import Proxy

Join = Callable[..., Awaitable[tuple[RawConnection, RawConnection]]]
Carry = Callable[[RawConnection, RawConnection, bytes], Awaitable[bytes]]


@pytest.fixture
def control() -> bytes:
    """What a control connection begins with."""
    return encode_frame(0, Hello(1, 0, PeerIdentity("me", "1"), Limits(), (), 1))[0]


@pytest.fixture
def lane() -> bytes:
    """What a payload lane begins with."""
    return encode_frame(0, Attach(b"token", 0))[0]


@pytest.fixture
async def listener() -> AsyncIterator[RawListener]:
    """Whom the proxy dials: the test itself plays it."""
    with RawListener() as listener:
        yield listener


@pytest.fixture
async def proxy(listener: RawListener) -> AsyncIterator[Proxy]:
    async with Proxy(listener.url) as proxy:
        yield proxy


@pytest.fixture
async def join(proxy: Proxy, listener: RawListener) -> AsyncIterator[Join]:
    """Return both ends of a new connection; the greeting, if any, has passed."""
    with contextlib.ExitStack() as stack:

        async def joined(
            greeting: bytes = b"",
        ) -> tuple[RawConnection, RawConnection]:
            before = proxy.counts.connections
            dialler = stack.enter_context(await RawConnection.dial(proxy.url))
            async with asyncio.timeout(10):
                accepted = await listener.accept()
                await until(lambda: proxy.counts.connections > before)
                await dialler.send(greeting)
                assert await accepted.receive(len(greeting)) == greeting
            return dialler, accepted

        yield joined


@pytest.fixture
async def ends(join: Join) -> tuple[RawConnection, RawConnection]:
    return await join()


@pytest.fixture
def near(ends: tuple[RawConnection, RawConnection]) -> RawConnection:
    """Who has dialled the proxy, in a connection without a greeting."""
    return ends[0]


@pytest.fixture
def far(ends: tuple[RawConnection, RawConnection]) -> RawConnection:
    """Whom the proxy has dialled for it."""
    return ends[1]


@pytest.fixture
def carry() -> Carry:
    """Send bytes from one end; return as much of them as comes to the other."""

    async def carried(source: RawConnection, sink: RawConnection, data: bytes) -> bytes:
        sending = asyncio.create_task(source.send(data))
        async with asyncio.timeout(10):
            came = await sink.receive(len(data))
            with contextlib.suppress(OSError):
                await sending
        return came

    return carried
