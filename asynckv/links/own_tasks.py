"""Tasks of one object: what they fail of is told to it, and none outlives it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from asynckv.shielding import clear_all_frames, wait_shielded

__all__ = ("OwnTasks",)


class OwnTasks:
    """``failed`` is told, on the loop, what a task has failed of.

    That error keeps nothing of what the task had in hand.
    """

    def __init__(self, failed: Callable[[Exception], None]) -> None:
        self._failed = failed
        self._tasks: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        """How many have not ended."""
        return len(self._tasks)

    def start(
        self, work: Callable[[], Awaitable[object]], name: str
    ) -> asyncio.Task[None]:
        """Begin ``work``; it is cancelled by :meth:`cancel` at the latest."""
        task = asyncio.get_running_loop().create_task(self._try(work), name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def cancel(self) -> None:
        """Cancel all of them. Never waits."""
        for task in self._tasks:
            task.cancel()

    async def wait(self) -> None:
        """Wait until all have ended. A cancelled call leaves no trace."""
        if self._tasks:
            await asyncio.wait(set(self._tasks))

    async def quiesce(self) -> None:
        """Cancel all of them, and wait until they have ended (shielded).

        As long as the slowest of them takes to let go.
        """
        self.cancel()
        ended = asyncio.gather(*self._tasks, return_exceptions=True)
        await wait_shielded(ended)

    async def _try(self, work: Callable[[], Awaitable[object]]) -> None:
        try:
            await work()
        except Exception as exc:  # noqa: BLE001 - whoever waits for it is told
            clear_all_frames(exc)
            self._failed(exc)
