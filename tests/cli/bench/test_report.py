from __future__ import annotations

from pathlib import Path

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
