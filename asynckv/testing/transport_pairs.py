"""Both ends of a payload transport, in one process."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable
from typing import Final, Literal, TypeAlias

from asynckv.abc import PayloadTransport
from asynckv.links.securing import wait_readable
from asynckv.transports.inline import InlineTransport
from asynckv.transports.mem import MemTransport

__all__ = ("TRANSPORT_KINDS", "TransportKind", "open_transport_pair")

TransportKind: TypeAlias = Literal["tcp", "unix", "mem"]

TRANSPORT_KINDS: Final[tuple[TransportKind, ...]] = ("tcp", "unix", "mem")
"""Lanes over two kinds of sockets, and memory of one process."""


@contextlib.asynccontextmanager
async def open_transport_pair(
    kind: TransportKind,
    near_lost: Callable[[Exception], None],
    far_lost: Callable[[Exception], None],
    *,
    digest: bool = True,
    lanes: int = 2,
) -> AsyncIterator[tuple[PayloadTransport, PayloadTransport]]:
    """Open both ends; they are closed when it is left, whatever was done to them."""
    loop = asyncio.get_running_loop()
    if kind == "mem":
        near: PayloadTransport = MemTransport(lanes, digest, loop, near_lost)
        far: PayloadTransport = MemTransport(lanes, digest, loop, far_lost)
        channels: tuple[object, object] = (far, near)
    else:
        near = InlineTransport(lanes, digest, loop, near_lost)
        far = InlineTransport(lanes, digest, loop, far_lost)
        with contextlib.ExitStack() as stack:
            pairs = []
            for _ in range(lanes):
                pairs.append(await _connected(kind))
                for sock in pairs[-1]:
                    stack.enter_context(sock)
            stack.pop_all()
        channels = ([pair[0] for pair in pairs], [pair[1] for pair in pairs])
    try:
        await near.open(far.describe(), channels[0])
        await far.open(near.describe(), channels[1])
        yield near, far
    finally:
        try:
            await near.aclose()
        finally:
            await far.aclose()


async def _connected(kind: TransportKind) -> tuple[socket.socket, socket.socket]:
    if kind == "unix":
        return socket.socketpair()
    near = socket.socket()
    try:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            for sock in (near, listener):
                sock.setblocking(False)
            # Plain calls: a cancellation could lose what is accepted.
            with contextlib.suppress(BlockingIOError):
                near.connect(listener.getsockname())
            await wait_readable(listener)
            return near, listener.accept()[0]
    except BaseException:
        near.close()
        raise
