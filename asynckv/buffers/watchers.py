"""Whoever waits for an object to change: one future each."""

from __future__ import annotations

import asyncio

__all__ = ("Watchers",)


class Watchers:
    """Futures of those who wait for the next change of one object."""

    __slots__ = ("_futures",)

    def __init__(self) -> None:
        self._futures: list[asyncio.Future[None]] = []

    def next_change(self) -> asyncio.Future[None]:
        """Return what is done when the object has changed; look at it then."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._futures.append(future)
        return future

    def wake(self) -> None:
        """The object has changed. Never waits."""
        futures, self._futures = self._futures, []
        for future in futures:
            if not future.done():
                future.set_result(None)
