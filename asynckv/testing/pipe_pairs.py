"""The two sides of an open pipe, in one process, over any scheme."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

from asynckv.pipes.opening import listen_pipe, open_pipe
from asynckv.pipes.pipe import Pipe
from asynckv.testing.pairs import Scheme, new_url
from asynckv.testing.pipe_conformance import PIPE_BYTES

__all__ = ("open_pipe_pair",)


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
