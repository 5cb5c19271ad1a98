"""How long to wait before a peer is dialled again."""

from __future__ import annotations

import random
from typing import Final

__all__ = ("Backoff",)

_FIRST_PAUSE_S: Final = 0.05
_LONGEST_PAUSE_S: Final = 1.0


class Backoff:
    """No pause at first, then longer and longer ones until :meth:`reset`."""

    def __init__(self) -> None:
        self._pause_s = 0.0

    def next_pause_s(self) -> float:
        """Return the pause before the next attempt.

        Many peers of one server shall not all come in one moment, so it is half
        of its length or more, by chance.
        """
        pause_s = self._pause_s * random.uniform(0.5, 1.0)
        self._pause_s = min(max(2 * self._pause_s, _FIRST_PAUSE_S), _LONGEST_PAUSE_S)
        return pause_s

    def reset(self) -> None:
        """An attempt was of use."""
        self._pause_s = 0.0
