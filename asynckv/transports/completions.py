"""Parts that threads have finished, handed to the event loop in batches."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import threading
from collections.abc import Callable
from typing import Final

from asynckv.transports.parts import Part

__all__ = ("Completions",)

_PARTS_A_TICK: Final = 64
"""The loop is given back to others after as many callbacks."""


class Completions:
    """One wake-up of the loop for all parts that were finished meanwhile."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, deliver: Callable[[Part], None]
    ) -> None:
        self._loop = loop
        self._deliver = deliver
        self._lock = threading.Lock()
        self._parts: collections.deque[Part] = collections.deque()

    def add(self, part: Part) -> None:
        """Let the loop deliver ``part`` soon. From any thread; never waits."""
        with self._lock:
            self._parts.append(part)
            is_first = len(self._parts) == 1
        if is_first:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._deliver_some)

    def deliver_all(self) -> None:
        """Deliver what there is, on the loop, at once."""
        for part in self._take(None):
            self._deliver(part)

    def _deliver_some(self) -> None:
        for part in self._take(_PARTS_A_TICK):
            self._deliver(part)

    def _take(self, limit: int | None) -> list[Part]:
        with self._lock:
            count = min(len(self._parts), limit or len(self._parts))
            taken = [self._parts.popleft() for _ in range(count)]
            if self._parts:
                self._loop.call_soon(self._deliver_some)
            return taken
