"""Notices a peer that is silent: kernels acknowledge for frozen processes too."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

__all__ = ("MISSED_BEATS", "Heartbeat")

MISSED_BEATS: Final = 3
"""As many silent intervals in a row, and the peer is dead."""


class Heartbeat:
    """Calls ``beat`` every interval, and ``dead`` after three silent ones.

    Set ``was_heard`` whenever anything comes from the peer. An interval in
    which this loop itself was late is not counted: what the peer sent may
    still be unread.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        interval_s: float,
        *,
        beat: Callable[[], None],
        dead: Callable[[], None],
    ) -> None:
        self.was_heard = True
        self._loop = loop
        self._interval_s = interval_s
        self._beat = beat
        self._dead = dead
        self._missed = 0
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Begin; the first beat comes after one interval."""
        self._timer = self._loop.call_later(
            self._interval_s, self._tick, self._loop.time() + self._interval_s
        )

    def stop(self) -> None:
        """End. Neither function is called any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _tick(self, due: float) -> None:
        stalled = self._loop.time() - due > self._interval_s / 2
        if self.was_heard:
            self._missed = 0
        elif not stalled:
            self._missed += 1
        self.was_heard = False
        if self._missed >= MISSED_BEATS:
            self.stop()
            self._dead()
            return
        self.start()
        self._beat()
