from __future__ import annotations

import pytest

from asynckv.testing.cancellations.grounds import Kind, open_ground
from asynckv.testing.cancellations.scenario import Scenario
from asynckv.testing.cancellations.streaming import STREAMING
from asynckv.testing.cancellations.sweeper import Sweeper


@pytest.mark.parametrize("kind", ["local", "mem"])
@pytest.mark.parametrize("scenario", STREAMING, ids=lambda scenario: scenario.name)
async def test_what_moves_is_aborted_or_given_back(
    scenario: Scenario, kind: Kind
) -> None:
    sweeper = Sweeper()
    async with open_ground(kind) as ground:
        for nbytes in scenario.sizes:
            await scenario.run(ground, sweeper, nbytes)
    assert sweeper.cancelled
