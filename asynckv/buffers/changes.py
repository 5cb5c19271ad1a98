"""Waiting for a state to change, on one Condition that plain functions notify."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

__all__ = ("Changes",)


class Changes:
    """Wakes whoever waits for a predicate over an object's state."""

    def __init__(self) -> None:
        self._condition = asyncio.Condition()
        self._notifying: asyncio.Task[None] | None = None
        self.waiting = 0

    async def until(self, predicate: Callable[[], bool]) -> None:
        """Wait until ``predicate()`` is true. Cancelling leaves no trace."""
        if predicate():
            return
        self.waiting += 1
        try:
            async with self._condition:
                await self._condition.wait_for(predicate)
        finally:
            self.waiting -= 1

    def notify_soon(self) -> None:
        """Let everybody look at the state again. Never waits."""
        # A Condition is notified under its lock, which a plain function cannot take.
        if self.waiting and (self._notifying is None or self._notifying.done()):
            self._notifying = asyncio.get_running_loop().create_task(
                self._notify(), name="asynckv: a buffer has changed"
            )

    async def aclose(self) -> None:
        """Wait for the last notification."""
        if self._notifying is not None:
            await asyncio.wait({self._notifying})

    async def _notify(self) -> None:
        async with self._condition:
            self._condition.notify_all()
