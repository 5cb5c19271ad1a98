from __future__ import annotations

import pytest

from harness.cancellations.grounds import Kind, open_ground
from harness.cancellations.piping import PIPING
from harness.cancellations.scenario import Scenario
from harness.cancellations.sweeper import Sweeper


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
