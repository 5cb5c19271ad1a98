"""The sides of an open pipe, and the ranks of a group, in one process."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from typing import Any

from asynckv.pipes.group import Group, join_group
from asynckv.pipes.opening import listen_pipe, open_pipe
from asynckv.pipes.pipe import Pipe
from asynckv.testing.pairs import Scheme, new_url
from asynckv.testing.pipe_checks.values import PIPE_BYTES

__all__ = ("free_port", "open_group", "open_pipe_pair")


@contextlib.asynccontextmanager
async def open_pipe_pair(
    scheme: Scheme = "tcp", **options: Any
) -> AsyncIterator[tuple[Pipe, Pipe]]:
    """Open a pipe; the first side has dialled, the second has accepted.

    ``options`` are those of :func:`asynckv.open_pipe`. Without one both sides
    have two lanes and a ``max_bytes`` of 1 MiB, as :func:`check_pipe` wants it.
    """
    options = {"lanes": 2, "max_bytes": PIPE_BYTES, **options}
    async with (
        listen_pipe(new_url(scheme), **options) as listener,
        open_pipe(listener.url, **options) as near,
        await listener.accept() as far,
    ):
        yield near, far


def free_port() -> int:
    """Return a port at which nobody listens now, for :func:`asynckv.join_group`."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


@contextlib.asynccontextmanager
async def open_group(size: int, **options: Any) -> AsyncIterator[tuple[Group, ...]]:
    """Open every rank of a group, in one process.

    ``options`` are those of :func:`asynckv.join_group`.
    """
    options = {"timeout_s": 10, "max_bytes": PIPE_BYTES, **options}
    port = free_port()
    managers = [
        join_group(rank=rank, size=size, host="127.0.0.1", port=port, **options)
        for rank in range(size)
    ]
    async with contextlib.AsyncExitStack() as stack:
        joining = (stack.enter_async_context(manager) for manager in managers)
        yield tuple(await asyncio.gather(*joining))
