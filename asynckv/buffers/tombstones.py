"""What is remembered of entries that left, so that a repeated insert is harmless."""

from __future__ import annotations

import collections

import msgspec

__all__ = ("MAX_AGE_S", "MAX_BYTES", "MAX_COUNT", "Tombstone", "Tombstones")

MAX_COUNT = 65_536
MAX_BYTES = MAX_COUNT * 1024
MAX_AGE_S = 600.0

_NBYTES = 512  # with its key, and its place in the order
_NBYTES_EACH = 72  # a token, or a consumer beside its name


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

    @property
    def nbytes(self) -> int:
        """About what it costs to remember it; an entry's id is 256 bytes at most."""
        nbytes = _NBYTES + _NBYTES_EACH * len(self.tokens)
        for consumer in self.consumers:
            nbytes += _NBYTES_EACH + len(consumer)
        return nbytes


class Tombstones:
    """Bounded by count, by bytes and by age, oldest forgotten first."""

    def __init__(
        self,
        max_count: int = MAX_COUNT,
        max_age_s: float = MAX_AGE_S,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        self.nbytes = 0
        self._max_count = max_count
        self._max_age_s = max_age_s
        self._max_bytes = max_bytes
        self._stones: collections.OrderedDict[str, Tombstone] = (
            collections.OrderedDict()
        )

    def __len__(self) -> int:
        return len(self._stones)

    def bury(self, entry_id: str, stone: Tombstone) -> None:
        """Remember that the entry left."""
        stones = self._stones
        if (earlier := stones.pop(entry_id, None)) is not None:
            self.nbytes -= earlier.nbytes
        stones[entry_id] = stone
        self.nbytes += stone.nbytes
        while len(stones) > self._max_count or self.nbytes > self._max_bytes:
            self._forget_oldest()

    def find(self, entry_id: str, now: float) -> Tombstone | None:
        """Return how the entry left, unless that is forgotten or unknown."""
        while self._stones:
            oldest = next(iter(self._stones.values()))
            if now - oldest.left_at <= self._max_age_s:
                break
            self._forget_oldest()
        return self._stones.get(entry_id)

    def _forget_oldest(self) -> None:
        _, stone = self._stones.popitem(last=False)
        self.nbytes -= stone.nbytes
