from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from asynckv.cli.bench.report import (
    FORMAT,
    Baseline,
    BenchReport,
    Histogram,
    Machine,
    Measured,
    Percentiles,
    Row,
    Spread,
    Subject,
    Unit,
    histogram_of,
    percentile,
    percentiles_of,
    spread_of,
)
from asynckv.cli.bench.wording import (
    write_comparison,
    write_cpu,
    write_direction,
    write_duration,
    write_nbytes,
    write_number,
    write_spread,
    write_summary,
    write_value,
    write_verdict,
)

PAGE = Path(__file__).parents[3] / "docs" / "bench.md"

STRUCTS = (
    Baseline,
    BenchReport,
    Histogram,
    Machine,
    Measured,
    Percentiles,
    Row,
    Spread,
    Subject,
)


def test_a_report_is_read_as_it_was_written(sample_report: BenchReport) -> None:
    encoded = msgspec.json.encode(sample_report)
    assert msgspec.json.decode(encoded, type=BenchReport) == sample_report


def test_a_reader_knows_the_format_before_all_else(sample_report: BenchReport) -> None:
    start = f'{{"format":"{FORMAT}"'.encode()
    assert msgspec.json.encode(sample_report).startswith(start)


@pytest.mark.parametrize("struct", STRUCTS)
def test_every_field_is_documented(struct: type[msgspec.Struct]) -> None:
    page = PAGE.read_text(encoding="utf-8")
    missing = [f for f in struct.__struct_fields__ if f"`{f}`" not in page]
    assert missing == []
    assert FORMAT in page


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


@pytest.mark.parametrize(
    "of", [spread_of, percentiles_of, lambda values: percentile(values, 0.5)]
)
def test_no_values_have_no_figures(of: Callable[[list[float]], object]) -> None:
    with pytest.raises(ValueError, match="no values"):
        of([])


@pytest.mark.parametrize(
    ("write", "value", "words"),
    [
        (write_nbytes, 64, "64 bytes"),
        (write_nbytes, 1024, "1 KiB"),
        (write_nbytes, 18 * 2**10, "18 KiB"),
        (write_nbytes, 2**26, "64 MiB"),
        (write_nbytes, 3 * 2**29, "1.5 GiB"),
        (write_number, 0.04321, "0.0432"),
        (write_number, 3.14159, "3.14"),
        (write_number, 999.9, "1,000"),
        (write_number, 12345.6, "12,346"),
        (write_duration, 0.2, "1 s"),
        (write_duration, 12.4, "12 s"),
        (write_duration, 47.0, "50 s"),
        (write_duration, 115.0, "2 minutes"),
    ],
)
def test_bytes_numbers_and_durations_are_said_as_people_say_them(
    write: Callable[[Any], str], value: float, words: str
) -> None:
    assert write(value) == words


def test_a_row_is_written_with_unit_and_spread(sample_report: BenchReport) -> None:
    row = sample_report.rows[0]
    assert row.ours is not None
    assert write_spread(row.ours.value) == "3 [2.7-3.3]"
    assert write_value(row) == "3 [2.7-3.3] GB/s"
    assert write_verdict(row) == "ok"
    assert write_cpu(row) == "CPU: 0.45 s a GB; raw TCP: 0.40 s"


def test_a_void_row_shouts_and_says_why(void_row: Row) -> None:
    words = write_comparison(void_row.subject, void_row.baselines[0])
    assert words.endswith("(void: its turns differ by 40%)")
    assert write_verdict(void_row) == "VOID: turns of raw TCP differ by 40%"


@pytest.mark.parametrize(
    ("unit", "ratio", "words"),
    [
        ("GB/s", Spread(2.74, 2.5, 2.9), "2.7 times faster than it [2.5-2.9]"),
        ("GB/s", Spread(0.05, 0.04, 0.1), "20 times slower than it [10-25]"),
        ("us", Spread(28, 25, 31), "28 times slower than it [25-31]"),
        ("us", Spread(0.5, 0.4, 0.8), "2.0 times faster than it [1.2-2.5]"),
        (
            "us",
            Spread(1.01, 0.5, 1.25),
            "as fast as it [1.2 times slower to 2.0 times faster]",
        ),
    ],
)
def test_a_comparison_says_in_words_which_way_is_better(
    unit: Unit, ratio: Spread, words: str
) -> None:
    subject = Subject("c", "c", "latency", unit, unit == "GB/s", 1)
    baseline = Baseline("it", Measured(ratio), ratio, 1.0, False)
    assert write_comparison(subject, baseline) == words
    assert words.startswith(write_direction(subject, baseline))


def test_lag_and_tail_have_words_of_their_own(sample_report: BenchReport) -> None:
    lag = sample_report.rows[3]
    assert write_direction(lag.subject, lag.baselines[0]).startswith("9.0 times later")


def test_a_failed_row_has_a_reason_and_no_figure(sample_report: BenchReport) -> None:
    row = sample_report.rows[-1]
    assert (write_value(row), write_cpu(row)) == ("", "")
    assert write_verdict(row) == "FAILED: PeerLost: the peer is gone"


def test_the_summary_counts_what_does_not_count(sample_report: BenchReport) -> None:
    assert write_summary(sample_report) == (
        "3 ok, 1 void (do not quote these), 1 failed"
    )
    quick = msgspec.structs.replace(sample_report, quick=True)
    assert "say little" in write_summary(quick)
    plain = msgspec.structs.replace(sample_report, is_bench=False)
    assert "the server is no bench" in write_summary(plain)
