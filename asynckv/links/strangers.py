"""Who has connected and not proved anything yet: few, and none for long.

When there is no room the newest is let in and another one goes, so that those
who say nothing keep nobody out: the oldest from the host that has the most.
"""

from __future__ import annotations

import collections
from typing import Generic, TypeVar

__all__ = ("Strangers",)

T = TypeVar("T")


class Strangers(Generic[T]):
    """At most ``max_count`` of them, in the order in which they came."""

    def __init__(self, max_count: int) -> None:
        self._max_count = max_count
        self._hosts: dict[T, str] = {}

    def __len__(self) -> int:
        return len(self._hosts)

    def add(self, stranger: T, host: str) -> T | None:
        """Let one in, and return the one that has to go for it, if any."""
        self._hosts[stranger] = host
        if len(self._hosts) <= self._max_count:
            return None
        counts = collections.Counter(self._hosts.values())
        most = max(counts, key=counts.__getitem__)
        victim = next(each for each, at in self._hosts.items() if at == most)
        del self._hosts[victim]
        return victim

    def discard(self, stranger: T) -> None:
        """It has proved itself, or is gone."""
        self._hosts.pop(stranger, None)
