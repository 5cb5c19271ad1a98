"""Whose turn it is to open pipes on a worker, which blocks it.

Both sides of a pipe take a turn, always that of the lower token first: so of any number
of workers that open pipes to each other none waits for one that waits for it.
"""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable

__all__ = ("Turn", "WorkerTurns")


class Turn:
    """One wish to open pipes, from the asking until it is over."""

    def __init__(self, begin: Callable[[], None]) -> None:
        self.begin = begin


class WorkerTurns:
    """First come, first served. From any thread; nothing waits."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._line: collections.deque[Turn] = collections.deque()

    @property
    def count(self) -> int:
        """How many have a turn or wait for one."""
        return len(self._line)

    def ask(self, begin: Callable[[], None]) -> Turn:
        """Call ``begin()`` when it is this one's turn: now, or by who ends another."""
        turn = Turn(begin)
        with self._lock:
            self._line.append(turn)
            is_first = len(self._line) == 1
        if is_first:
            begin()
        return turn

    def end(self, turn: Turn) -> None:
        """It is over, or not wanted any more. A second call does nothing."""
        with self._lock:
            if turn not in self._line:
                return
            was_first = self._line[0] is turn
            self._line.remove(turn)
            follower = self._line[0] if was_first and self._line else None
        if follower is not None:
            follower.begin()
