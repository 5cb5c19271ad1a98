"""When a pipe copies what the peer shows before the application asks for it.

At once where the application takes what it is given. Where it says ``into=`` what,
the copying waits for that a little while: then there is one copy, not two.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, Generic, TypeVar

__all__ = ("ReadAhead",)

_T = TypeVar("_T")

_WAIT_S: Final = 0.002


class ReadAhead(Generic[_T]):
    """Calls ``begin`` for each that is added, soon or later, unless it is forgotten."""

    def __init__(self, begin: Callable[[_T], None]) -> None:
        self._begin = begin
        self._waiting: dict[_T, None] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._wants_into = True  # nobody knows yet
        self._was_asked = False
        self._count = 1
        self.is_paused = False
        """Is one just being copied to where the application wants it?"""

    def add(self, arrival: _T) -> None:
        """It can be copied. Never waits."""
        if self._wants_into:
            self._waiting[arrival] = None
            self._look_later()
        else:
            self._begin(arrival)

    def forget(self, arrival: _T) -> None:
        """It is copied already, or nobody wants it any more."""
        self._waiting.pop(arrival, None)
        if not self._waiting:
            self.stop()

    def asked(self, *, into: bool) -> None:
        """The application asks for the next tensor."""
        self._was_asked, self._count = True, 1
        self._wants_into = into
        if not into:
            self._begin_some(len(self._waiting))

    def stop(self) -> None:
        """Begin nothing more, until more is added."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look_later(self) -> None:
        if self._timer is None and self._waiting:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(_WAIT_S, self._look)

    def _look(self) -> None:
        self._timer = None
        if not (self._was_asked or self.is_paused):
            self._begin_some(self._count)
            self._count *= 2  # who has not asked for so long may not ask soon
        self._was_asked = False
        self._look_later()

    def _begin_some(self, count: int) -> None:
        for arrival in list(self._waiting)[:count]:
            del self._waiting[arrival]
            self._begin(arrival)
        if not self._waiting:
            self.stop()
