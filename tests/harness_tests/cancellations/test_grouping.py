from __future__ import annotations

import pytest

from harness.cancellations.grounds import Kind, open_ground
from harness.cancellations.grouping import GROUPING
from harness.cancellations.scenario import Scenario
from harness.cancellations.sweeper import Sweeper


@pytest.mark.parametrize("kind", ["tcp"])
@pytest.mark.parametrize("scenario", GROUPING, ids=lambda scenario: scenario.name)
async def test_the_other_rank_is_told(scenario: Scenario, kind: Kind) -> None:
    sweeper = Sweeper()
    async with open_ground(kind) as ground:
        for nbytes in scenario.sizes:
            await scenario.run(ground, sweeper, nbytes)
    assert sweeper.cancelled
