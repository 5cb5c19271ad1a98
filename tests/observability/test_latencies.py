"""How long things took, by buckets."""

from __future__ import annotations

import pytest

from asynckv.observability.latencies import BOUNDS_S, LatencyHistogram


@pytest.mark.parametrize(
    ("took_s", "bucket"),
    [
        (0.0, 0),
        (BOUNDS_S[0], 0),
        (BOUNDS_S[0] * 1.01, 1),
        (BOUNDS_S[-1], len(BOUNDS_S) - 1),
        (BOUNDS_S[-1] + 1, len(BOUNDS_S)),
    ],
)
def test_each_is_counted_in_the_first_bucket_that_does_not_end_before(
    took_s: float, bucket: int
) -> None:
    histogram = LatencyHistogram()
    histogram.observe(took_s)
    found = histogram.latencies()
    assert [n for n, count in enumerate(found.counts) if count] == [bucket]


def test_counts_add_up_and_so_does_the_time() -> None:
    histogram = LatencyHistogram()
    for took_s in (0.001, 0.002, 100.0):
        histogram.observe(took_s)
    found = histogram.latencies()
    assert found.count == 3 and found.total_s == pytest.approx(100.003)
    in_order = list(found.cumulative())
    assert in_order == sorted(in_order) and in_order[-1] == 3
    assert in_order[BOUNDS_S.index(1e-3)] == 1


def test_what_was_read_stays_as_it_was() -> None:
    histogram = LatencyHistogram()
    before = histogram.latencies()
    histogram.observe(1.0)
    assert before.count == 0 and histogram.latencies().count == 1
