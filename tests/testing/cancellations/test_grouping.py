from __future__ import annotations

import pytest

from asynckv.testing.cancellations.grounds import Kind, open_ground
from asynckv.testing.cancellations.grouping import GROUPING
from asynckv.testing.cancellations.scenario import Scenario
from asynckv.testing.cancellations.sweeper import Sweeper


@pytest.mark.parametrize("kind", ["tcp"])
@pytest.mark.parametrize("scenario", GROUPING, ids=lambda scenario: scenario.name)
async def test_the_other_rank_is_told(scenario: Scenario, kind: Kind) -> None:
    sweeper = Sweeper()
    async with open_ground(kind) as ground:
        for nbytes in scenario.sizes:
            await scenario.run(ground, sweeper, nbytes)
    assert sweeper.cancelled
