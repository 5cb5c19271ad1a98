from __future__ import annotations

import pytest

from asynckv.testing.cancellations.grounds import open_ground
from asynckv.testing.cancellations.scenario import Scenario
from asynckv.testing.cancellations.staging_on_gpus import STAGING_ON_GPUS
from asynckv.testing.cancellations.sweeper import Sweeper


@pytest.mark.parametrize(
    "scenario", STAGING_ON_GPUS, ids=lambda scenario: scenario.name
)
async def test_layers_that_are_made_on_a_gpu_keep_none_of_it(
    scenario: Scenario,
) -> None:
    sweeper = Sweeper()
    async with open_ground("local") as ground:
        await scenario.run(ground, sweeper, *scenario.sizes)
    assert sweeper.cancelled
