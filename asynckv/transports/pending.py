"""The parts that a side was given and has told nobody of yet.

Those that threads have finished are handed to the event loop in batches.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import threading
from collections.abc import Callable
from typing import Final

from asynckv.shielding import wait_shielded
from asynckv.transports.parts import Part

__all__ = (
    "Completions",
    "PendingParts",
)


class PendingParts:
    """Parts by transfer, from the call until somebody is told. On the loop only."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._parts: dict[int, set[Part]] = {}
        self._gone: asyncio.Future[None] | None = None

    def __bool__(self) -> bool:
        return bool(self._parts)

    def __contains__(self, part: Part) -> bool:
        return part in self._parts.get(part.transfer, ())

    def add(self, part: Part) -> None:
        """Somebody waits to be told of ``part``."""
        self._parts.setdefault(part.transfer, set()).add(part)

    def tell(self, part: Part) -> None:
        """Tell of a part that has moved, if anybody still waits for it."""
        parts = self._parts.get(part.transfer)
        if parts is not None:
            parts.discard(part)
            if not parts:
                del self._parts[part.transfer]
        part.tell()
        self._settle()

    def stop(self, transfer: int) -> None:
        """Nobody waits for this transfer any more."""
        for part in self._parts.pop(transfer, ()):
            part.stopped = True
        self._settle()

    def take_all(self) -> list[Part]:
        """Forget and return every part."""
        parts = [part for parts in self._parts.values() for part in parts]
        self._parts.clear()
        self._settle()
        return parts

    async def wait_until_none(self, timeout_s: float) -> None:
        """Wait until there is none left, for ``timeout_s`` at most. Shielded."""
        if self._parts:
            if self._gone is None:
                self._gone = self._loop.create_future()
            await wait_shielded(self._gone, timeout_s=timeout_s)

    def _settle(self) -> None:
        if self._gone is not None and not self._parts:
            self._gone.set_result(None)
            self._gone = None


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
