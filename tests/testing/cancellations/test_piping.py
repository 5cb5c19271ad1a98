from __future__ import annotations

import pytest

from asynckv.testing.cancellations.grounds import Kind, open_ground
from asynckv.testing.cancellations.piping import PIPING
from asynckv.testing.cancellations.scenario import Scenario
from asynckv.testing.cancellations.sweeper import Sweeper


@pytest.mark.parametrize("kind", ["mem"])
@pytest.mark.parametrize("scenario", PIPING, ids=lambda scenario: scenario.name)
async def test_nothing_was_sent_and_nothing_was_taken(
    scenario: Scenario, kind: Kind
) -> None:
    sweeper = Sweeper()
    async with open_ground(kind) as ground:
        for nbytes in scenario.sizes:
            await scenario.run(ground, sweeper, nbytes)
    assert sweeper.cancelled
