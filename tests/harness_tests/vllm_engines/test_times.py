from __future__ import annotations

from typing import Any

from harness.vllm_engines import times
from harness.vllm_engines.times import StepTimes


class Connector:
    """Has every call, and one that makes another."""

    def __getattr__(self, name: str) -> Any:
        if name not in times._CALLS:
            raise AttributeError(name)
        return lambda: name

    def get_transfer_results(self) -> str:
        return str(self.take_events())


def test_only_steps_that_ran_the_model_are_steps() -> None:
    timed = StepTimes()
    for seconds, has_executed in ((0.1, True), (9.0, False), (0.3, True)):
        timed.end_step(seconds, has_executed)
    report = timed.report()
    assert (report["steps"], report["idle_steps"]) == (2, 1)
    assert report["step_s"] == 0.2


def test_calls_belong_to_the_step_that_follows_them() -> None:
    timed, connector = StepTimes(), Connector()
    timed.watch(connector)
    assert connector.get_transfer_results() == "take_events"
    timed.end_step(1.0, True)
    timed.end_step(1.0, True)
    report = timed.report()
    assert 0 < report["calls_s"] < 0.1
    assert report["call_s"] == report["calls_s"] / 2
    assert report["calls"]["get_transfer_results"][0] == 1
    assert report["calls"]["take_events"][0] == 0


def test_a_connector_may_be_watched_again() -> None:
    connector = Connector()
    StepTimes().watch(connector)
    timed = StepTimes()
    timed.watch(connector)
    assert connector.take_events() == "take_events"
    assert connector.take_events.__wrapped__.__name__ == "<lambda>"
