from __future__ import annotations

import msgspec
import pytest

from asynckv.cli.demo.messages import Filled, Generated, Prefilled
from asynckv.cli.demo.play import (
    account_backpressure,
    account_hand_over,
    find_problems,
)
from asynckv.cli.demo.report import BackpressureSample, DemoReport, HandOver

PREFILLED = Prefilled(
    ended_s=102.0,
    spans=((100.0, 101.0), (101.0, 102.0)),
    handed_s=(100.5, 101.5),
    worst_lag_s=0.001,
)
GENERATED = Generated(
    landed_s=(100.75, 102.25),
    token_times_s=(102.5, 103.0),
    prompt_positions=1,
    attempt=1,
    tokens=(7, 8),
    worst_lag_s=0.001,
)


def samples(*waiting: int) -> tuple[BackpressureSample, ...]:
    return tuple(
        BackpressureSample(
            at_s=float(index),
            buffered_bytes=100 * index,
            resident_bytes=1000 + 10 * index,
            waiting=count,
        )
        for index, count in enumerate(waiting)
    )


def test_a_hand_over_counts_from_its_request() -> None:
    one = account_hand_over("Bulk", 99.5, PREFILLED, GENERATED)
    assert (one.prefill_s, one.landed_s, one.first_token_s) == (2.5, 2.75, 3.0)
    assert one.layers[0].compute_start_s == 0.5


def test_each_layer_has_its_own_row() -> None:
    rows = account_hand_over("Bulk", 100.0, PREFILLED, GENERATED).layers
    assert [row.landed_s for row in rows] == [0.75, 2.25]
    assert [row.name for row in rows] == ["layers.0", "layers.1"]


def test_notes_about_different_numbers_of_layers_do_not_fit() -> None:
    short = msgspec.structs.replace(GENERATED, landed_s=(100.75,))
    with pytest.raises(ValueError, match="shorter"):
        account_hand_over("Bulk", 100.0, PREFILLED, short)


def test_memory_is_judged_while_inserts_wait() -> None:
    filled = Filled((0.1, 0.5), samples(0, 1, 1, 0), 0.002)
    report = account_backpressure(filled, entry_bytes=100, max_bytes=250)
    assert report.resident_growth_bytes == 10
    assert (report.longest_wait_s, report.peak_bytes) == (0.5, 300)


def test_a_good_run_has_no_problems(sample_report: DemoReport) -> None:
    assert list(find_problems(sample_report)) == []


@pytest.mark.parametrize("act", ["bulk", "layerwise"])
def test_a_token_that_differs_is_a_problem(sample_report: DemoReport, act: str) -> None:
    good: HandOver = getattr(sample_report, act)
    bad = msgspec.structs.replace(good, tokens=(*good.tokens[:-1], 0))
    report = msgspec.structs.replace(sample_report, **{act: bad})
    assert [*find_problems(report)] == [
        f"{good.title}: the tokens differ from the recomputed ones"
    ]
    assert not report.tokens_identical


def test_more_than_one_computed_position_is_a_problem(
    sample_report: DemoReport,
) -> None:
    bulk = msgspec.structs.replace(sample_report.bulk, prompt_positions=2)
    report = msgspec.structs.replace(sample_report, bulk=bulk)
    assert [*find_problems(report)] == ["KV in bulk: the decoder computed 2 positions"]


def test_a_second_request_that_found_less_than_it_says_is_a_problem(
    sample_report: DemoReport,
) -> None:
    second = msgspec.structs.replace(sample_report.second, prompt_positions=13)
    report = msgspec.structs.replace(sample_report, second=second)
    assert [*find_problems(report)] == [
        "Second request: the decoder computed 13 positions"
    ]


def test_a_token_that_differs_in_the_second_request_is_a_problem(
    sample_report: DemoReport,
) -> None:
    second = msgspec.structs.replace(sample_report.second, tokens=(1,))
    report = msgspec.structs.replace(sample_report, second=second)
    assert any("Second request: the tokens" in words for words in find_problems(report))
    assert not report.tokens_identical


def test_a_bound_that_was_not_kept_is_a_problem(sample_report: DemoReport) -> None:
    slow = msgspec.structs.replace(sample_report.backpressure, peak_bytes=10**12)
    report = msgspec.structs.replace(sample_report, backpressure=slow)
    assert [*find_problems(report)] == [
        "Slow decoder: the buffer held more than max_bytes"
    ]
