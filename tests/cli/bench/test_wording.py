from __future__ import annotations

import msgspec

from asynckv.cli.bench.report import BenchReport, Row
from asynckv.cli.bench.wording import (
    write_baseline,
    write_cpu,
    write_nbytes,
    write_number,
    write_spread,
    write_summary,
    write_value,
    write_verdict,
)


def test_bytes_are_written_in_the_largest_unit() -> None:
    sizes = (64, 1024, 18 * 2**10, 2**26, 3 * 2**29)
    assert [write_nbytes(size) for size in sizes] == [
        "64 bytes",
        "1 KiB",
        "18 KiB",
        "64 MiB",
        "1.5 GiB",
    ]


def test_numbers_have_three_digits_or_all_before_the_point() -> None:
    numbers = (0.04321, 3.14159, 999.9, 12345.6)
    assert [write_number(one) for one in numbers] == [
        "0.0432",
        "3.14",
        "1,000",
        "12,346",
    ]


def test_a_row_is_written_with_unit_and_spread(sample_report: BenchReport) -> None:
    row = sample_report.rows[0]
    assert row.ours is not None
    assert write_spread(row.ours.value) == "3 [2.7-3.3]"
    assert write_value(row) == "3 [2.7-3.3] GB/s"
    assert write_verdict(row) == "ok"
    assert write_cpu(row) == "0.45 CPU s/GB, raw TCP 0.40"


def test_a_void_row_shouts_and_says_why(void_row: Row) -> None:
    assert "VOID" in write_baseline(void_row.baselines[0])
    assert write_verdict(void_row).startswith("VOID: raw TCP / itself = 1.4")


def test_a_failed_row_has_a_reason_and_no_figure(sample_report: BenchReport) -> None:
    row = sample_report.rows[-1]
    assert (write_value(row), write_cpu(row)) == ("", "")
    assert write_verdict(row) == "FAILED: PeerLost: the peer is gone"


def test_the_summary_counts_what_does_not_count(sample_report: BenchReport) -> None:
    assert write_summary(sample_report) == "3 ok, 1 void, 1 failed"
    quick = msgspec.structs.replace(sample_report, quick=True)
    assert "say little" in write_summary(quick)
