from __future__ import annotations

import pytest

from asynckv.testing.cancellations.grounds import open_ground
from asynckv.testing.cancellations.inserting_on_gpus import INSERTING_ON_GPUS
from asynckv.testing.cancellations.scenario import Scenario
from asynckv.testing.cancellations.sweeper import Sweeper


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
