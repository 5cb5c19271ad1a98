from __future__ import annotations

import pytest

from asynckv.cli.bench.report import (
    Histogram,
    Spread,
    histogram_of,
    percentile,
    percentiles_of,
    spread_of,
)


def test_a_spread_is_median_least_and_most() -> None:
    assert spread_of([3.0, 1.0, 2.0]) == Spread(2.0, 1.0, 3.0)


def test_a_percentile_is_one_of_the_values() -> None:
    values = [float(value) for value in range(100)]
    assert (percentile(values, 0.5), percentile(values, 0.99)) == (50.0, 99.0)
    assert percentile(values, 1.0) == 99.0


def test_percentiles_count_the_calls() -> None:
    found = percentiles_of([4.0, 1.0])
    assert (found.count, found.p50, found.most) == (2, 4.0, 4.0)


def test_every_value_is_in_one_bin_and_those_outside_in_the_outermost() -> None:
    found = histogram_of([-1.0, 0.0, 1.0, 9.0, 10.0, 99.0], (0.0, 1.0, 10.0))
    assert found == Histogram((0.0, 1.0, 10.0), (2, 4))


def test_no_values_have_no_figures() -> None:
    for function in (spread_of, percentiles_of):
        with pytest.raises(ValueError, match="no values"):
            function([])
    with pytest.raises(ValueError, match="no values"):
        percentile([], 0.5)
