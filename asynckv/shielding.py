"""Waiting that holds a cancellation back until memory is quiet.

Both kinds of cancellation are held back: ``task.cancel()``, also when it is
repeated, and a cancelled anyio scope, which cancels every ``await`` below it.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Final, TypeVar

import anyio

# The first scope would import it, on a running loop: 16 ms.
import anyio._backends._asyncio

__all__ = ("wait_or_stop", "wait_shielded")

_T = TypeVar("_T")

_LONG_S: Final = 3600.0


async def wait_shielded(
    future: asyncio.Future[_T], *, timeout_s: float | None = None
) -> None:
    """Wait until ``future`` is done; a cancellation is delivered after that.

    Waits for ``timeout_s`` at most, and says nothing when that is over. Without
    it only for futures that are sure to be done within bounded time.
    """
    loop = asyncio.get_running_loop()
    end = math.inf if timeout_s is None else loop.time() + timeout_s
    held_back: asyncio.CancelledError | None = None
    with anyio.CancelScope(shield=True):
        while not future.done() and (left_s := end - loop.time()) > 0:
            try:
                await asyncio.wait({future}, timeout=min(left_s, _LONG_S))
            except asyncio.CancelledError as exc:
                held_back = exc
    if held_back is not None:
        try:
            raise held_back
        finally:
            # Its traceback holds this frame, and the frames hold memory.
            held_back = None


async def wait_or_stop(future: asyncio.Future[_T], stop: Callable[[], None]) -> None:
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
