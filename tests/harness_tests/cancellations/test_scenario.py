from __future__ import annotations

from harness.cancellations.grounds import Ground
from harness.cancellations.scenario import Scenario
from harness.cancellations.sweeper import Sweeper


async def a_call(ground: Ground, sweeper: Sweeper, nbytes: int) -> None:
    """Does nothing."""


def test_a_scenario_is_called_what_it_runs() -> None:
    assert Scenario(a_call, ()).name == "a_call"


def test_a_scenario_with_a_label_is_called_that() -> None:
    assert Scenario(a_call, (), label="another").name == "another"
