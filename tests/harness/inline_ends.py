"""Two ends of the inline transport, or one beside a bare socket."""

from __future__ import annotations

import asyncio
import contextlib
import select
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any, Final

from asynckv.transports.inline import InlineTransport

__all__ = (
    "CHUNK_NBYTES",
    "InlineEnd",
    "Landing",
    "open_beside_a_socket",
    "open_inline_ends",
    "tcp_pair",
)

CHUNK_NBYTES: Final = 64 * 1024


class InlineEnd:
    """One end of a connection: a transport, and why it was lost."""

    def __init__(
        self, lanes: int, *, digest: bool = True, chunk_bytes: int = CHUNK_NBYTES
    ) -> None:
        loop = asyncio.get_running_loop()
        self.lost: list[Exception] = []
        self.transport = InlineTransport(
            lanes, digest, loop, self.lost.append, max_chunk_bytes=chunk_bytes
        )

    def send(self, transfer: int, part: int, source: Any, **known: Any) -> Landing:
        """Send a part; return what waits until it has left."""
        landing = Landing()
        self.transport.send(transfer, part, memoryview(source), landing, **known)
        return landing

    def receive(self, transfer: int, part: int, target: Any) -> Landing:
        """Let a part land in ``target``; return what waits until it has."""
        landing = Landing()
        self.transport.receive(transfer, part, memoryview(target), landing)
        return landing


class Landing:
    """Waits for a part's ``done``, and refuses a second one."""

    def __init__(self) -> None:
        self.future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    def __call__(self, digest: bytes, error: BaseException | None) -> None:
        if error is None:
            self.future.set_result(digest)
        else:
            self.future.set_exception(error)

    def __await__(self) -> Any:
        return asyncio.wait_for(self.future, 10).__await__()


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    """Return both ends of a connection over the loopback."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.socket()
        for end in (near, listener):  # tests refuse a call that may block their loop
            end.setblocking(False)
        near.connect_ex(listener.getsockname())
        select.select([listener], [], [], 10)
        far, _ = listener.accept()
    for end in (near, far):
        end.setblocking(True)
    return near, far


@contextlib.asynccontextmanager
async def open_inline_ends(
    lanes: int = 1,
    connect: Callable[[], tuple[Any, Any]] = tcp_pair,
    *,
    digest: bool = True,
) -> AsyncIterator[tuple[InlineEnd, InlineEnd]]:
    """Open two ends of so many lanes; both are closed at the end."""
    pairs = [connect() for _ in range(lanes)]
    ends = InlineEnd(lanes, digest=digest), InlineEnd(lanes, digest=digest)
    for end, sockets in zip(ends, zip(*pairs, strict=True), strict=True):
        await end.transport.open(b"", sockets)
    try:
        yield ends
    finally:
        await ends[0].transport.aclose()
        await ends[1].transport.aclose()


@contextlib.asynccontextmanager
async def open_beside_a_socket(
    chunk_bytes: int = CHUNK_NBYTES,
) -> AsyncIterator[tuple[InlineEnd, socket.socket]]:
    """Open one end of one lane, whose peer says what it likes."""
    near, far = tcp_pair()
    end = InlineEnd(1, chunk_bytes=chunk_bytes)
    await end.transport.open(b"", [near])
    with far:
        yield end, far
        await end.transport.aclose()
