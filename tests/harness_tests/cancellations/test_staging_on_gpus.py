from __future__ import annotations

import pytest

from harness.cancellations.grounds import open_ground
from harness.cancellations.scenario import Scenario
from harness.cancellations.staging_on_gpus import STAGING_ON_GPUS
from harness.cancellations.sweeper import Sweeper


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
