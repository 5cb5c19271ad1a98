"""Which of the values that nobody uses goes next, when there has to be room."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

__all__ = ("EvictionOrder",)

K = TypeVar("K", bound=Hashable)


class EvictionOrder(Generic[K]):
    """Keys that may be dropped, from the least to the most recently used.

    A key in use is not in here: it is taken out when its use begins and added
    again, as the most recently used, when that ends. Everything is O(1).
    """

    def __init__(self) -> None:
        self._nbytes_of: OrderedDict[K, int] = OrderedDict()
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._nbytes_of)

    def __iter__(self) -> Iterator[K]:
        return iter(self._nbytes_of)

    def add(self, key: K, nbytes: int, *, is_used: bool = True) -> None:
        """Make ``key`` the most recently used, or else the next to go.

        It would free ``nbytes``.
        """
        self.nbytes += nbytes - self._nbytes_of.pop(key, 0)
        self._nbytes_of[key] = nbytes
        if not is_used:
            self._nbytes_of.move_to_end(key, last=False)

    def discard(self, key: K) -> None:
        """Take ``key`` out; nothing happens if it is not in here."""
        self.nbytes -= self._nbytes_of.pop(key, 0)

    def victim(self, spare: K | None = None) -> K | None:
        """Return what to drop next: ``spare`` only when nothing else is left."""
        for key in self._nbytes_of:
            if key != spare:
                return key
        return spare if spare in self._nbytes_of else None
