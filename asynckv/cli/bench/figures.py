"""Sums over samples: medians, percentiles, histograms. Pure functions of numbers."""

from __future__ import annotations

import bisect
import statistics
from collections.abc import Sequence

import msgspec

__all__ = (
    "Histogram",
    "Percentiles",
    "Spread",
    "histogram_of",
    "percentile",
    "percentiles_of",
    "spread_of",
)


class Spread(msgspec.Struct, frozen=True):
    """The median of the rounds, and the least and the most of them."""

    median: float
    least: float
    most: float


class Percentiles(msgspec.Struct, frozen=True):
    """Single calls of all rounds together, not medians of rounds."""

    count: int
    p50: float
    p90: float
    p99: float
    most: float


class Histogram(msgspec.Struct, frozen=True):
    """``counts[i]`` values are in ``edges[i] <= value < edges[i + 1]``.

    Values outside are counted in the first and in the last bin.
    """

    edges: tuple[float, ...]
    counts: tuple[int, ...]


def spread_of(values: Sequence[float]) -> Spread:
    """Return median, least and most.

    :raises ValueError: there are no values
    """
    if not values:
        raise ValueError("no values, no spread")
    return Spread(statistics.median(values), min(values), max(values))


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value below which ``share`` of the values are.

    >>> percentile(range(1, 101), 0.99), percentile([7.0], 0.5)
    (100, 7.0)

    :raises ValueError: there are no values
    """
    if not values:
        raise ValueError("no values, no percentile")
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


def percentiles_of(values: Sequence[float]) -> Percentiles:
    """Return the percentiles that a row shows.

    :raises ValueError: there are no values
    """
    p50, p90, p99 = (percentile(values, share) for share in (0.5, 0.9, 0.99))
    return Percentiles(len(values), p50, p90, p99, max(values))


def histogram_of(values: Sequence[float], edges: Sequence[float]) -> Histogram:
    """Count the values between ascending ``edges``."""
    counts = [0] * (len(edges) - 1)
    for value in values:
        place = bisect.bisect_right(edges, value) - 1
        counts[min(max(place, 0), len(counts) - 1)] += 1
    return Histogram(tuple(edges), tuple(counts))
