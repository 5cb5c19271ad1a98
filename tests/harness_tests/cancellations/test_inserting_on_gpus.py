from __future__ import annotations

import pytest

from harness.cancellations.grounds import open_ground
from harness.cancellations.inserting_on_gpus import INSERTING_ON_GPUS
from harness.cancellations.scenario import Scenario
from harness.cancellations.sweeper import Sweeper


@pytest.mark.chaos
@pytest.mark.parametrize(
    "scenario", INSERTING_ON_GPUS, ids=lambda scenario: scenario.name
)
async def test_what_is_put_is_whole_or_as_it_was(
    scenario: Scenario,
) -> None:
    sweeper = Sweeper()
    async with open_ground("local") as ground:
        await scenario.run(ground, sweeper, scenario.sizes[-1])
    assert sweeper.cancelled > 3
