"""What is asked of the engines."""

from __future__ import annotations

from asynckv.cli.demo.cache.workload import read_workload


def test_requests_go_to_one_engine_and_the_other_in_turn() -> None:
    steps = read_workload().steps
    assert [step.part for step in steps] == ["document"] * 6 + ["chat"] * 6
    assert [step.engine for step in steps] == [1, 2] * 6
    assert len({step.words for step in steps}) == 12


def test_the_document_is_long_and_the_chat_is_not_about_it() -> None:
    workload = read_workload()
    assert len(workload.document) > 7_000
    assert not any("Ansa" in step.words for step in workload.steps[6:])
