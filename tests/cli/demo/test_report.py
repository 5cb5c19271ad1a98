from __future__ import annotations

import msgspec
import pytest

from asynckv.cli.demo.report import DemoReport


def test_a_layer_that_is_there_before_the_compute_ends_has_a_tail_below_zero(
    sample_report: DemoReport,
) -> None:
    assert round(sample_report.layerwise.tail_s, 6) == -0.025
    assert round(sample_report.bulk.tail_s, 6) == 0.11


def test_the_stages_of_a_first_token_add_up_from_the_request(
    sample_report: DemoReport,
) -> None:
    for one in (sample_report.bulk, sample_report.layerwise, sample_report.second):
        assert min(one.stages_s) >= 0.0
        assert sum(one.stages_s) == pytest.approx(one.first_token_s)
    assert sample_report.bulk.stages_s == pytest.approx((2.4, 0.11, 0.03))
    assert sample_report.layerwise.stages_s == pytest.approx((2.375, 0.0, 0.055))


def test_what_a_second_request_saves_may_be_nothing(sample_report: DemoReport) -> None:
    assert sample_report.second.saved_share == pytest.approx(0.9)
    slow = msgspec.structs.replace(sample_report.second, first_token_s=5.0)
    assert slow.saved_share == pytest.approx(-1.0)


def test_a_report_survives_json(sample_report: DemoReport) -> None:
    line = msgspec.json.encode(sample_report)
    assert msgspec.json.decode(line, type=DemoReport) == sample_report


def test_the_successor_s_tokens_count_too(sample_report: DemoReport) -> None:
    taken = msgspec.structs.replace(sample_report.survival.taken_over, tokens=())
    survival = msgspec.structs.replace(sample_report.survival, taken_over=taken)
    report = msgspec.structs.replace(sample_report, survival=survival)
    assert sample_report.tokens_identical
    assert not report.tokens_identical
