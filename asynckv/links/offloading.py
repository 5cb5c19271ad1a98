"""Work that would block the loop for a moment, done in a thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

import anyio.to_thread

from asynckv.shielding import wait_shielded

__all__ = ("in_thread",)

T = TypeVar("T")


async def in_thread(work: Callable[[], T]) -> T:
    """Return what ``work`` returns, or raise what it raises; it runs in a thread.

    ``work`` is sure to return within bounded time: a cancellation is delivered
    after that, so that nothing is closed under its feet.
    """
    # A limiter of its own: an application that keeps all of anyio's threads
    # busy does not keep links from being opened.
    running = anyio.to_thread.run_sync(work, limiter=anyio.CapacityLimiter(1))
    task = asyncio.create_task(running, name="asynckv: work in a thread")
    task.add_done_callback(_see)
    await wait_shielded(task)
    return task.result()


def _see(task: asyncio.Task[T]) -> None:
    """Look at the error of work that nobody waits for any more."""
    if not task.cancelled():
        task.exception()
