from __future__ import annotations

import msgspec

from asynckv.cli.demo.report import DemoReport


def test_a_layer_that_lands_during_the_compute_leaves_no_tail(
    sample_report: DemoReport,
) -> None:
    assert sample_report.layerwise.tail_s == 0.0
    assert round(sample_report.bulk.tail_s, 6) == 0.11


def test_the_wait_counts_from_the_end_of_the_compute(
    sample_report: DemoReport,
) -> None:
    assert round(sample_report.bulk.wait_s, 6) == 0.14


def test_a_report_survives_json(sample_report: DemoReport) -> None:
    line = msgspec.json.encode(sample_report)
    assert msgspec.json.decode(line, type=DemoReport) == sample_report


def test_the_successor_s_tokens_count_too(sample_report: DemoReport) -> None:
    taken = msgspec.structs.replace(sample_report.survival.taken_over, tokens=())
    survival = msgspec.structs.replace(sample_report.survival, taken_over=taken)
    report = msgspec.structs.replace(sample_report, survival=survival)
    assert sample_report.tokens_identical
    assert not report.tokens_identical
