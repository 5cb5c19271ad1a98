"""What is asked of the engines, what figures add up to, and what is a problem."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from asynckv.cli.demo.cache.report import (
    CHUNK_TOKENS,
    CacheReport,
    find_problems,
    hit_rate,
    read_workload,
)


def test_a_run_in_which_all_went_well_has_no_problem(cache_report: CacheReport) -> None:
    assert [*find_problems(cache_report)] == []
    assert cache_report.tokens_identical
    assert cache_report.document_ratio == pytest.approx(0.1)
    assert cache_report.restart_ratio == pytest.approx(0.125)
    assert len(cache_report.cold_first_tokens_s) == 3
    assert len(cache_report.found_first_tokens_s) == 5
    assert cache_report.read_blocks == {"memory": 28 * 6 + 30, "disk": 28}


def test_the_hit_rate_is_of_tokens(cache_report: CacheReport) -> None:
    cold, warm = cache_report.shared[:2]
    assert hit_rate([cold, warm]) == 28 * CHUNK_TOKENS / 3600


def changed(report: CacheReport, place: str, **values: Any) -> CacheReport:
    """Return a report in which one request is another."""
    name, _, index = place.partition(".")
    several = getattr(report, name)
    if not index:
        other: Any = msgspec.structs.replace(several, **values)
    else:
        one = msgspec.structs.replace(several[int(index)], **values)
        other = (*several[: int(index)], one, *several[int(index) + 1 :])
    return msgspec.structs.replace(report, **{name: other})


NOTHING: dict[str, Any] = {"found_tokens": 0, "by_tier": {}}


@pytest.mark.parametrize(
    ("place", "values", "problem"),
    [
        ("shared.3", {"tokens": (9,)}, "question 4: the tokens differ"),
        ("restarted.1", {"tokens": (9,)}, "the old engine: the tokens differ"),
        ("shared.1", NOTHING, "question 2, engine 2: less was found than was stored"),
        (
            "shared.8",
            {"found_tokens": CHUNK_TOKENS, "by_tier": {"memory": 1}},
            "turn 3, engine 1: less was found than was stored",
        ),
        ("restarted.1", NOTHING, "the old engine, engine 1: less was found"),
        ("shared.2", {"found_tokens": CHUNK_TOKENS}, "not all that was there was"),
        ("restarted.0", {"by_tier": {"memory": 28}}, "the disk had nothing of the"),
        (
            "cold",
            {"found_tokens": CHUNK_TOKENS, "by_tier": {"memory": 1}},
            "The cold engine was not cold",
        ),
    ],
)
def test_what_was_not_kept_is_told(
    cache_report: CacheReport, place: str, values: dict[str, Any], problem: str
) -> None:
    (told,) = {*find_problems(changed(cache_report, place, **values))}
    assert problem in told


def test_requests_go_to_one_engine_and_the_other_in_turn() -> None:
    steps = read_workload().steps
    assert [step.part for step in steps] == ["document"] * 6 + ["chat"] * 6
    assert [step.engine for step in steps] == [1, 2] * 6
    assert len({step.words for step in steps}) == 12


def test_the_document_is_long_and_the_chat_is_not_about_it() -> None:
    workload = read_workload()
    assert len(workload.document) > 7_000
    assert not any("Ansa" in step.words for step in workload.steps[6:])
