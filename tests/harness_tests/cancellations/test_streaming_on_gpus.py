from __future__ import annotations

import pytest

from harness.cancellations.grounds import open_ground
from harness.cancellations.scenario import Scenario
from harness.cancellations.streaming_on_gpus import STREAMING_ON_GPUS
from harness.cancellations.sweeper import Sweeper


@pytest.mark.chaos
@pytest.mark.parametrize(
    "scenario", STREAMING_ON_GPUS, ids=lambda scenario: scenario.name
)
async def test_a_stream_on_one_gpu_is_read_or_given_back(scenario: Scenario) -> None:
    sweeper = Sweeper()
    async with open_ground("local") as ground:
        await scenario.run(ground, sweeper, scenario.sizes[-1])
    assert sweeper.cancelled > 3
