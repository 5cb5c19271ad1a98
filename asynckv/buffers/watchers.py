"""Whoever waits for an object to change: one future each."""

from __future__ import annotations

import asyncio

__all__ = ("Watchers",)


class Watchers:
    """Futures of those who wait for the next change of one object.

    Of ten thousand objects each has one who waits: he costs no list.
    """

    __slots__ = ("_first", "_others")

    def __init__(self) -> None:
        self._first: asyncio.Future[None] | None = None
        self._others: list[asyncio.Future[None]] | None = None

    def next_change(self, loop: asyncio.AbstractEventLoop) -> asyncio.Future[None]:
        """Return what is done when the object has changed; look at it then."""
        # The loop is known to who waits; asked of asyncio it costs a system call.
        future: asyncio.Future[None] = loop.create_future()
        if self._first is None:
            self._first = future
        elif self._others is None:
            self._others = [future]
        else:
            self._others.append(future)
        return future

    def wake(self) -> None:
        """The object has changed. Never waits."""
        first, others = self._first, self._others
        if first is None:
            return  # nor is there any other
        self._first = self._others = None
        if not first.done():
            first.set_result(None)
        for future in others or ():
            if not future.done():
                future.set_result(None)
