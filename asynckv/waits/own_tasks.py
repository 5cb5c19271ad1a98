"""Tasks of one object: it knows when they end, and none outlives it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from asynckv.waits.waiting import clear_all_frames, wait_shielded

__all__ = ("OwnTasks", "PlainTaskGroup")


def _raise(error: Exception) -> None:
    raise error


class OwnTasks:
    """``failed`` is told, on the loop, what a task has failed of.

    That error keeps nothing of what the task had in hand. ``all_ended`` is called each
    time that the last of them has ended. They are of those of ``within``, too.
    """

    def __init__(
        self,
        failed: Callable[[Exception], None] = _raise,
        all_ended: Callable[[], None] = lambda: None,
        within: OwnTasks | None = None,
    ) -> None:
        self.all_ended = all_ended
        self._within = within
        self._failed = failed
        self._tasks: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        """How many have not ended."""
        return len(self._tasks)

    def start(
        self, work: Callable[[], Awaitable[object]], name: str
    ) -> asyncio.Task[None]:
        """Begin ``work``; it is cancelled by :meth:`cancel` at the latest."""
        return self.own(self._try(work), name)

    def own(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """As :meth:`start`; but what it fails of is told by the task alone."""
        if self._within is not None:
            task = self._within.own(work, name)
        else:
            task = asyncio.get_running_loop().create_task(work, name=name)
        return self.adopt(task)

    def adopt(self, task: asyncio.Task[None]) -> asyncio.Task[None]:
        """Let a task that another one owns be one of these, too."""
        self._tasks.add(task)
        task.add_done_callback(self._task_ended)
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

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not self._tasks:
            self.all_ended()

    async def _try(self, work: Callable[[], Awaitable[object]]) -> None:
        try:
            await work()
        except Exception as exc:  # noqa: BLE001 - whoever waits for it is told
            clear_all_frames(exc)
            self._failed(exc)


class PlainTaskGroup(asyncio.TaskGroup):
    """Raises the first error of its tasks as it is, not within a group of errors."""

    async def __aexit__(self, *exc_info: Any) -> None:
        try:
            await super().__aexit__(*exc_info)
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None
