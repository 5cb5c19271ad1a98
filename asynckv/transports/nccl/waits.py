"""Who waits until something is so that plain functions make so. On the loop only."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from asynckv.shielding import wait_shielded

__all__ = ("Waits",)


class Waits:
    """One future a wait; :meth:`settle` looks at all of them."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waits: list[tuple[Callable[[], bool], asyncio.Future[None]]] = []

    async def wait(
        self, is_over: Callable[[], bool], *, timeout_s: float | None
    ) -> None:
        """Wait until ``is_over()``. Within ``timeout_s`` it is shielded; else not."""
        if is_over():
            return
        future: asyncio.Future[None] = self._loop.create_future()
        self._waits.append((is_over, future))
        if timeout_s is None:
            await future
        else:
            await wait_shielded(future, timeout_s=timeout_s)

    def settle(self) -> None:
        """Something has changed."""
        waits, self._waits = self._waits, []
        for is_over, future in waits:
            if future.done():
                continue
            if is_over():
                future.set_result(None)
            else:
                self._waits.append((is_over, future))
