from __future__ import annotations

import pytest

from asynckv.testing.cancellations.grounds import Kind, open_ground
from asynckv.testing.cancellations.scenario import Scenario
from asynckv.testing.cancellations.storing import STORING
from asynckv.testing.cancellations.sweeper import Sweeper


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
