"""Waiting that holds a cancellation back until memory is quiet.

Both kinds of cancellation are held back: ``task.cancel()``, also when it is
repeated, and a cancelled anyio scope, which cancels every ``await`` below it.
"""

from __future__ import annotations

import asyncio
import gc
import math
import traceback
from collections.abc import Callable
from typing import Final, TypeVar

import anyio

# The first scope would import it, on a running loop: 16 ms.
import anyio._backends._asyncio

__all__ = ("clear_all_frames", "wait_or_stop", "wait_shielded")

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


def clear_all_frames(error: BaseException) -> None:
    """Let go of what an error's frames hold: its own, its cause's, and its context's.

    Those of a group's members too. Memory that they refer to would be kept as long as
    somebody keeps the error. A frame that is running, or suspended, keeps what it has:
    it may be that of another task, which has caught one of the errors and goes on.
    """
    seen, left = set[int](), [error]
    while left:
        one = left.pop()
        if id(one) not in seen:
            seen.add(id(one))
            _clear_frames(one)
            left += [x for x in (one.__cause__, one.__context__) if x is not None]
            if isinstance(one, BaseExceptionGroup):
                left += one.exceptions


def _clear_frames(error: BaseException) -> None:
    for frame, _ in traceback.walk_tb(error.__traceback__):
        # Until 3.12 clear() closes the suspended coroutine of a frame. CPython tracks
        # a frame from when it is over: until then its stack, or coroutine, owns it.
        if gc.is_tracked(frame):
            frame.clear()
