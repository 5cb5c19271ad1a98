"""Waiting that holds a cancellation back until memory is quiet.

Both kinds of cancellation are held back: ``task.cancel()``, also when it is
repeated, and a cancelled anyio scope, which cancels every ``await`` below it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import anyio

__all__ = ("wait_or_stop", "wait_shielded")


async def wait_shielded(future: asyncio.Future[None]) -> None:
    """Wait until ``future`` is done; a cancellation is delivered after that.

    For futures that are sure to be done within bounded time only.
    """
    held_back: asyncio.CancelledError | None = None
    with anyio.CancelScope(shield=True):
        while not future.done():
            try:
                await asyncio.wait({future})
            except asyncio.CancelledError as exc:
                held_back = exc
    if held_back is not None:
        raise held_back


async def wait_or_stop(future: asyncio.Future[None], stop: Callable[[], None]) -> None:
    """Wait until ``future`` is done; a cancellation calls ``stop`` first.

    ``stop`` makes ``future`` be done soon, and the cancellation is delivered
    then. It is called too if the coroutine is closed while it waits.
    """
    try:
        await asyncio.wait({future})
    except asyncio.CancelledError:
        stop()
        await wait_shielded(future)
        raise
    except GeneratorExit:
        stop()
        raise
