"""Work that would block the loop for a moment, done in a thread of its own."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import TypeVar

from asynckv.shielding import wait_shielded

__all__ = ("in_thread",)

T = TypeVar("T")


async def in_thread(work: Callable[[], T]) -> T:
    """Return what ``work`` returns, or raise what it raises; it runs in a thread.

    ``work`` is sure to return within bounded time: a cancellation is delivered
    after that, so that nothing is closed under its feet.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()
    values: list[T] = []
    errors: list[Exception] = []

    def run() -> None:
        try:
            values.append(work())
        except Exception as exc:  # noqa: BLE001 - raised where it is waited for
            errors.append(exc)
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(done.set_result, None)

    threading.Thread(target=run, name="asynckv-handshake", daemon=True).start()
    await wait_shielded(done)
    if errors:
        raise errors.pop()
    return values[0]
