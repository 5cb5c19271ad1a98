"""Who acts beside a call that is cancelled: makes room, brings, takes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Final

from asynckv.buffers.lookup import LookupBuffer
from asynckv.testing.blocked import until
from asynckv.types import TensorSpec
from harness.cancellations.grounds import BUFFER_BYTES
from harness.cancellations.sweeper import Sweeper

__all__ = ("Closing", "Filler", "Partner")

_SPECS: Final = {"key": TensorSpec((BUFFER_BYTES - 64,), "uint8")}


class Partner:
    """Does something once the call has come so far, or is over.

    >>> partner = Partner(sweeper, lambda: statistics().waiting_selects == 1, insert)
    """

    def __init__(
        self,
        sweeper: Sweeper,
        has_come: Callable[[], bool],
        act: Callable[[], Awaitable[object]],
    ) -> None:
        self.is_over = False
        self._sweeper = sweeper
        self._has_come = has_come
        self._act = act
        self.task: asyncio.Task[Any] = asyncio.create_task(self._run())

    async def ended(self) -> Any:
        """The call is over: wait until this partner has done its part."""
        self.is_over = True
        return await self.task

    async def _run(self) -> object:
        await until(lambda: self.is_over or self._has_come())
        await self._sweeper.pause()
        return await self._act()


class Closing:
    """Closes; ``has_begun`` unless it was cancelled before its first step.

    Once it has begun, what is closed is closed at its end, however it ends.
    """

    def __init__(self) -> None:
        self.has_begun = False

    async def run(self, close: Callable[[], Awaitable[None]]) -> None:
        self.has_begun = True
        await close()


class Filler:
    """Takes all the room of a buffer, and gives it back, without moving a byte."""

    def __init__(self, local: LookupBuffer) -> None:
        self._local = local
        self._freed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def fill(self, entry_id: str | None = None) -> None:
        """Take the room, by an entry of that id."""
        self._freed.clear()
        self._task = asyncio.create_task(self._hold(entry_id))
        await until(lambda: self._local.statistics().used_bytes >= BUFFER_BYTES - 64)

    async def fill_for(
        self, sweeper: Sweeper, act: Callable[[], Awaitable[object]]
    ) -> Partner:
        """Take the room; return the partner that acts once an insert waits for it."""
        await self.fill()
        return Partner(
            sweeper, lambda: self._local.statistics().waiting_inserts > 0, act
        )

    async def free(self) -> None:
        """Give it back. May be called again."""
        self._freed.set()
        if self._task is not None:
            await self._task

    async def _hold(self, entry_id: str | None) -> None:
        opened = self._local.open_insert([2], None, _SPECS, entry_id=entry_id)
        try:
            async with opened:
                await self._freed.wait()
                raise _Freed
        except _Freed:
            pass


class _Freed(Exception):
    pass
