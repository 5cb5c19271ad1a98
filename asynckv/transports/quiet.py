"""Who waits until no thread touches the memory of a transfer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from asynckv.shielding import wait_shielded

__all__ = ("QuietWaits",)

_QUIET_S: Final = 1.0
"""A lane that does not let go of memory for as long is shut down."""


class QuietWaits:
    """One future for each wait, settled by a plain function. On the loop only."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, is_touched: Callable[[int], bool]
    ) -> None:
        self._loop = loop
        self._is_touched = is_touched
        self._waits: list[tuple[int, asyncio.Future[None]]] = []

    async def wait(self, transfer: int, give_up: Callable[[], None]) -> None:
        """Wait until nobody touches ``transfer``; shielded.

        After 1 s ``give_up()`` is called, which makes that be so soon.
        """
        if not self._is_touched(transfer):
            return
        future: asyncio.Future[None] = self._loop.create_future()
        self._waits.append((transfer, future))
        timer = self._loop.call_later(_QUIET_S, give_up)
        try:
            await wait_shielded(future)
        finally:
            timer.cancel()

    def settle(self) -> None:
        """To be called whenever a thread has let go of memory."""
        waiting = []
        for transfer, future in self._waits:
            if self._is_touched(transfer):
                waiting.append((transfer, future))
            elif not future.done():
                future.set_result(None)
        self._waits = waiting
