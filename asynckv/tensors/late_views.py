"""Views that are kept long after their entries have left: counted, each said once."""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from asynckv.tensors.paged_arena import SlabRegion

__all__ = ("LATE_S", "LateViews")

logger = logging.getLogger(__name__)

LATE_S: Final = 10.0


class LateViews:
    """Counts regions whose views are still there 10 s after they were released."""

    def __init__(self) -> None:
        self.count = 0
        self._watched: dict[SlabRegion, float] = {}
        """When each is late, the first one first."""
        self._timer: asyncio.TimerHandle | None = None
        self._is_stopped = False

    def watch(self, region: SlabRegion) -> None:
        """A region was released while somebody has a view. Never waits."""
        self._watched.pop(region, None)
        self._forget_unpinned()
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:  # released after the loop's end
            return
        if not self._is_stopped:
            self._watched[region] = loop.time() + LATE_S
            self._recheck_later(loop)

    def stop(self) -> None:
        """Watch no more. Never waits."""
        self._is_stopped = True
        self._watched.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _recheck_later(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._timer is None and self._watched:
            self._timer = loop.call_at(
                next(iter(self._watched.values())), self._recheck
            )

    def _recheck(self) -> None:
        self._timer, loop = None, asyncio.get_running_loop()
        late = [r for r, at in self._watched.items() if at <= loop.time()]
        for region in late:
            del self._watched[region]
        sizes = [region.nbytes for region in late if region.is_pinned]
        self.count += len(sizes)
        if sizes:
            logger.warning(
                "views of %d tensors (%d bytes) have been kept for %g s after their "
                "entries left: nothing else can use that memory",
                len(sizes),
                sum(sizes),
                LATE_S,
            )
        self._forget_unpinned()
        self._recheck_later(loop)

    def _forget_unpinned(self) -> None:
        while self._watched:
            region = next(iter(self._watched))
            if region.is_pinned:
                return
            del self._watched[region]
