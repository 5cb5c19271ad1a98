"""Judges whether a remote writer has fallen silent."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Final

from asynckv.errors import EntryAborted

__all__ = ("SILENCE_S", "Silence")

SILENCE_S: Final = 30.0
"""A writer that puts nothing for as long, on a live link, has failed."""


class Silence:
    """Listens from now on, until :meth:`stop`; ``failed`` is told, once, of silence.

    ``landed`` returns how many bytes have come of each transfer that is under way: a
    tensor that comes slowly is no silence. Nor does it count while ``is_working`` says
    that this side has work to do on what came. Nothing here waits.
    """

    def __init__(
        self,
        landed: Callable[[], Mapping[int, int]],
        failed: Callable[[Exception], None],
        *,
        is_working: Callable[[], bool],
    ) -> None:
        self._landed = landed
        self._is_working = is_working
        self._failed = failed
        self._loop = asyncio.get_running_loop()
        self._landed_bytes: Mapping[int, int] = {}
        self._is_over = False
        self._timer = self._listen()

    def hear(self) -> None:
        """The writer is alive."""
        self._timer.cancel()
        if not self._is_over:
            self._timer = self._listen()

    def stop(self) -> None:
        """Listen no more."""
        self._is_over = True
        self._timer.cancel()

    def _listen(self) -> asyncio.TimerHandle:
        return self._loop.call_later(SILENCE_S, self._fall_silent)

    def _fall_silent(self) -> None:
        landed = self._landed()
        has_grown = landed != self._landed_bytes and any(landed.values())
        if has_grown or self._is_working():
            self._landed_bytes = landed
            self.hear()
            return
        message = f"no tensor came for {SILENCE_S:.0f} s"
        self._failed(EntryAborted(message, reason="producer"))
