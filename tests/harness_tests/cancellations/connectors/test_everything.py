from __future__ import annotations

import pytest

from harness.cancellations.connectors import everything
from harness.cancellations.connectors.everything import (
    open_ground,
    run_scenarios,
)
from harness.cancellations.connectors.scenario import ConnectorScenario
from harness.cancellations.sweeper import Sweeper, ticks


async def three_ticks(ground: object, sweeper: Sweeper) -> None:
    async def check(outcome: object) -> None:
        assert sweeper.chance is None or sweeper.cancelled < 60

    await sweeper.sweep("ticks", lambda: ticks(3), check)


@pytest.mark.parametrize("name", ["pull", "on GPUs", "pushed to GPUs"])
async def test_a_ground_has_its_scenarios(name: str) -> None:
    async with open_ground(name) as (ground, scenarios):
        await ground.check_quiet()
        assert {scenario.name for scenario in scenarios} < {
            scenario.name for scenario in everything.SCENARIOS
        }


async def test_there_is_no_other_ground() -> None:
    with pytest.raises(ValueError, match="no ground 'moon'"):
        async with open_ground("moon"):
            pass


async def test_it_goes_on_until_it_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(everything, "STORES", [ConnectorScenario(three_ticks, ())])
    sweeper = Sweeper()
    await run_scenarios("store", sweeper, at_least=50)
    assert 50 <= sweeper.cancelled < 50 + sweeper.rounds_each


async def test_a_broken_promise_is_told_with_the_seed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(everything, "STORES", [ConnectorScenario(three_ticks, ())])
    with pytest.raises(AssertionError) as caught:
        await run_scenarios("store", Sweeper(), at_least=100, seed=7)
    assert caught.value.__notes__[-1].startswith("three_ticks: 7 ")
