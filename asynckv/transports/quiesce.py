"""How a transport ends: once, for one reason, and nobody is told too early.

Who has lent it memory waits until no thread touches that.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable
from typing import Final

from asynckv.transports.parts import TransferPart, call_on
from asynckv.waits.waiting import Waits, wait_shielded

__all__ = (
    "Ending",
    "QuiesceWaits",
)


class Ending:
    """The one end of a transport, and what every part is told then.

    ``hang_up()`` lets threads and tasks end soon; ``is_touching()`` says whether
    one is left that may touch a part's memory; ``take_left()`` forgets and returns
    the parts that nobody was told of. All three are called on the loop.

    ``on_lost(error)`` is called before any part is told, and only where the end
    was not this side's wish.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        on_lost: Callable[[Exception], None],
        *,
        hang_up: Callable[[], None],
        is_touching: Callable[[], bool],
        take_left: Callable[[], Iterable[TransferPart]],
    ) -> None:
        self.error: Exception | None = None
        self._loop = loop
        self._on_lost = on_lost
        self._hang_up = hang_up
        self._is_touching = is_touching
        self._take_left = take_left
        self._over: asyncio.Future[None] = loop.create_future()

    def lose(self, error: Exception) -> None:
        """End because of the peer or the world. Only the first end counts."""
        if self.error is None:
            self.end(error)
            self._on_lost(error)

    def end(self, error: Exception) -> None:
        """End by the wish of this side. Only the first end counts."""
        if self.error is not None:
            return
        self.error = error
        self._hang_up()
        self.settle_soon()

    def settle_soon(self) -> None:
        """Call :meth:`settle` in the loop's next round. From any thread."""
        call_on(self._loop, self.settle)

    def settle(self) -> None:
        """Tell what is left, if this is the end and all memory is quiet.

        To be called whenever a thread or task has let go.
        """
        if self.error is None or self._is_touching():
            return
        for part in self._take_left():
            part.complete(self.error)
        if not self._over.done():
            self._over.set_result(None)

    async def wait(self, timeout_s: float) -> None:
        """Wait until every part was told, for ``timeout_s`` at most. Shielded."""
        await wait_shielded(self._over, timeout_s=timeout_s)


_QUIET_S: Final = 1.0
"""A lane that does not let go of memory for as long is shut down."""


class QuiesceWaits:
    """Waits for memory of transfers, until nobody touches it. On the loop only."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, is_touched: Callable[[int], bool]
    ) -> None:
        self._loop = loop
        self._is_touched = is_touched
        self._waits = Waits(loop)
        self.settle = self._waits.settle
        """To be called whenever a thread has let go of memory."""

    async def wait(self, transfer: int, give_up: Callable[[], None]) -> None:
        """Wait until nobody touches ``transfer``; shielded.

        After 1 s ``give_up()`` is called, which makes that be so soon.
        """
        if not self._is_touched(transfer):
            return
        timer = self._loop.call_later(_QUIET_S, give_up)
        try:
            await self._waits.wait(
                lambda: not self._is_touched(transfer), timeout_s=math.inf
            )
        finally:
            timer.cancel()
