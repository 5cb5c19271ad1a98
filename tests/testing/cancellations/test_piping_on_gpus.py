from __future__ import annotations

import pytest

from asynckv.testing.cancellations.grounds import open_ground
from asynckv.testing.cancellations.piping_on_gpus import PIPING_ON_GPUS
from asynckv.testing.cancellations.scenario import Scenario
from asynckv.testing.cancellations.sweeper import Sweeper


@pytest.mark.trust
@pytest.mark.parametrize("scenario", PIPING_ON_GPUS, ids=lambda scenario: scenario.name)
async def test_what_is_cancelled_of_a_pipe_on_gpus_keeps_nothing(
    scenario: Scenario,
) -> None:
    sweeper = Sweeper()
    async with open_ground("local") as ground:
        await scenario.run(ground, sweeper, scenario.sizes[-1])
    assert sweeper.cancelled > 3
