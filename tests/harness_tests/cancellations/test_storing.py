from __future__ import annotations

import pytest

from harness.cancellations.grounds import Kind, open_ground
from harness.cancellations.scenario import Scenario
from harness.cancellations.storing import STORING
from harness.cancellations.sweeper import Sweeper


@pytest.mark.parametrize("kind", ["local", "mem"])
@pytest.mark.parametrize("scenario", STORING, ids=lambda scenario: scenario.name)
async def test_a_value_is_the_old_one_or_the_new_one(
    scenario: Scenario, kind: Kind
) -> None:
    sweeper = Sweeper()
    async with open_ground(kind) as ground:
        for nbytes in scenario.sizes:
            await scenario.run(ground, sweeper, nbytes)
    assert sweeper.cancelled
