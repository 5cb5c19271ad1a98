"""What is remembered of entries that left, so that a repeated insert is harmless."""

from __future__ import annotations

import collections

import msgspec

__all__ = ("MAX_AGE_S", "MAX_COUNT", "Tombstone", "Tombstones")

MAX_COUNT = 65_536
MAX_AGE_S = 600.0


class Tombstone(msgspec.Struct, frozen=True, gc=False):
    """How an entry left. ``reason`` is empty if by its last acknowledgement.

    ``tokens`` are those of the deliveries that counted. ``attempts`` is not 0 if
    it had been delivered when it left: sent again it goes on there, whatever it
    left by. Only what failed too often may fail as often again.
    """

    reason: str
    digest: bytes
    tokens: tuple[bytes, ...]
    left_at: float
    attempts: int = 0
    failures: int = 0
    consumers: frozenset[str] = frozenset()


class Tombstones:
    """Bounded by count and by age, oldest forgotten first."""

    def __init__(
        self, max_count: int = MAX_COUNT, max_age_s: float = MAX_AGE_S
    ) -> None:
        self._max_count = max_count
        self._max_age_s = max_age_s
        self._stones: collections.OrderedDict[str, Tombstone] = (
            collections.OrderedDict()
        )

    def __len__(self) -> int:
        return len(self._stones)

    def bury(self, entry_id: str, stone: Tombstone) -> None:
        """Remember that the entry left."""
        stones = self._stones
        stones[entry_id] = stone
        stones.move_to_end(entry_id)
        if len(stones) > self._max_count:
            stones.popitem(last=False)

    def find(self, entry_id: str, now: float) -> Tombstone | None:
        """Return how the entry left, unless that is forgotten or unknown."""
        while self._stones:
            oldest = next(iter(self._stones.values()))
            if now - oldest.left_at <= self._max_age_s:
                break
            self._stones.popitem(last=False)
        return self._stones.get(entry_id)
