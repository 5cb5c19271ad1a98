"""One timer for all entries that have a time to live."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable, Mapping

__all__ = ("ExpiryClock",)


class ExpiryClock:
    """Calls ``expire(entry_id)`` when an entry's time is over.

    It may be called for an entry that has left or is held by now: whoever is
    called looks again. ``present`` tells which ids are still worth a place here.
    """

    def __init__(
        self, expire: Callable[[str], None], present: Mapping[str, object]
    ) -> None:
        self._expire = expire
        self._present = present
        self._due: list[tuple[float, str]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0  # uvloop's handles do not all know when

    def add(self, at: float, entry_id: str) -> None:
        """Ask to be called at loop time ``at``."""
        heapq.heappush(self._due, (at, entry_id))
        if len(self._due) > 1024 + 2 * len(self._present):
            self._due = [due for due in self._due if due[1] in self._present]
            heapq.heapify(self._due)
        if self._timer is None or at < self._timer_at:
            self._arm()

    def stop(self) -> None:
        """Forget everything."""
        self._due.clear()
        self._arm()

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._due:
            self._timer_at = self._due[0][0]
            loop = asyncio.get_running_loop()
            self._timer = loop.call_at(self._timer_at, self._call)

    def _call(self) -> None:
        self._timer = None
        now = asyncio.get_running_loop().time()
        while self._due and self._due[0][0] <= now:
            self._expire(heapq.heappop(self._due)[1])
        self._arm()
