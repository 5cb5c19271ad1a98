"""Who is heard next, among the links that share a loop.

A link that says a little at a time is heard as it speaks. One that has said more
than a turn holds waits in line with the others that have; while somebody else is
being heard, all of these together may say so much a second. So a flood of requests
that are all legal keeps nobody waiting who waits for an answer.

Counted in frames: a simulation, and a loop whose clock stands still in a tick, hear
the same bytes in the same order.
"""

from __future__ import annotations

import asyncio
import collections
import itertools
import math
from typing import Final, Protocol

__all__ = ("AT_ONCE", "Speaker", "Turns")

AT_ONCE: Final = 128
"""So many frames of one link are heard before others have their turn."""

_HEARD_S: Final = 0.05
"""For so long one who says little is likely to go on, after an answer."""

_BESIDE_OTHERS_PER_S: Final = 5000
_BESIDE_OTHERS: Final = 4
_PAUSE_S: Final = 0.0005
_ALONE: Final = 128

_NOBODY: Final = (0, -math.inf)


class Speaker(Protocol):
    """Who has said more than a turn holds."""

    def go_on(self, max_count: int) -> int:
        """Be heard; return how many frames that were. Who has more waits again."""


class Turns:
    """The line of one loop. Plain functions; nothing here waits.

    Each speaker has a number of its own, by which it is known when it was heard.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._line: collections.deque[Speaker] = collections.deque()
        self._is_due = False
        self._paused_s = 0.0
        self._numbers = itertools.count(1)
        # The last two who say little: one of them may be about to say much.
        self._heard = self._heard_before = _NOBODY

    @property
    def is_shared(self) -> bool:
        """Whether somebody was heard just now who does not wait in line."""
        return self._loop.time() < self._heard[1] + _HEARD_S

    def new_number(self) -> int:
        """Return the number of one more speaker."""
        return next(self._numbers)

    def note_heard(self, number: int) -> None:
        """Somebody who says little was heard."""
        if self._heard[0] != number:
            self._heard_before = self._heard
        self._heard = (number, self._loop.time())

    def wait(self, number: int, speaker: Speaker) -> None:
        """Call ``speaker.go_on`` when it is its turn, on a later tick."""
        if self._heard[0] == number:
            self._heard, self._heard_before = self._heard_before, _NOBODY
        self._line.append(speaker)
        if not self._is_due:
            self._is_due = True
            self._paused_s = self._loop.time()
            self._loop.call_soon(self._next)

    def _next(self) -> None:
        now_s = self._loop.time()
        left = _ALONE
        if self.is_shared:
            # What is due for the time since the last turn: a loop may be slow.
            left = int((now_s - self._paused_s) * _BESIDE_OTHERS_PER_S)
            left = min(max(left, _BESIDE_OTHERS), _ALONE)
        while self._line and left > 0:
            speaker = self._line.popleft()
            left -= max(1, speaker.go_on(min(left, AT_ONCE)))
        self._paused_s = now_s
        self._is_due = bool(self._line)
        if not self._is_due:
            return
        if self.is_shared:
            self._loop.call_later(_PAUSE_S, self._next)
        else:
            self._loop.call_soon(self._next)
