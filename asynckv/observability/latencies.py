"""How long things took: counted by fixed bounds, so that it costs next to nothing."""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections.abc import Iterator
from typing import Final

__all__ = ("BOUNDS_S", "Latencies", "LatencyHistogram")

BOUNDS_S: Final = (
    *(50e-6, 100e-6, 250e-6, 500e-6, 1e-3, 2.5e-3, 5e-3, 10e-3, 25e-3, 50e-3),
    *(0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 60.0),
)
"""Each bucket ends at one of these, in seconds; the last one has no end."""


@dataclasses.dataclass(frozen=True)
class Latencies:
    """A histogram at one moment: ``counts`` of each bucket alone, and their sum."""

    counts: tuple[int, ...]
    total_s: float

    @property
    def count(self) -> int:
        """How many were counted."""
        return sum(self.counts)

    def cumulative(self) -> Iterator[int]:
        """Yield of each bucket how many took as long as its end, or less."""
        return itertools.accumulate(self.counts)


class LatencyHistogram:
    """Counts how long something took. One thread only; nothing here waits."""

    __slots__ = ("_counts", "_total_s")

    def __init__(self) -> None:
        self._counts = [0] * (len(BOUNDS_S) + 1)
        self._total_s = 0.0

    def observe(self, took_s: float) -> None:
        """It took so long, once more."""
        self._counts[bisect.bisect_left(BOUNDS_S, took_s)] += 1
        self._total_s += took_s

    def latencies(self) -> Latencies:
        """Return what was counted so far."""
        return Latencies(tuple(self._counts), self._total_s)
