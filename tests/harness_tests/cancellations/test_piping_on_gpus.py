from __future__ import annotations

import pytest

from harness.cancellations.grounds import open_ground
from harness.cancellations.piping_on_gpus import PIPING_ON_GPUS
from harness.cancellations.scenario import Scenario
from harness.cancellations.sweeper import Sweeper


@pytest.mark.trust
@pytest.mark.parametrize("scenario", PIPING_ON_GPUS, ids=lambda scenario: scenario.name)
async def test_what_is_cancelled_of_a_pipe_on_gpus_keeps_nothing(
    scenario: Scenario,
) -> None:
    sweeper = Sweeper()
    async with open_ground("local") as ground:
        await scenario.run(ground, sweeper, scenario.sizes[-1])
    assert sweeper.cancelled > 3
