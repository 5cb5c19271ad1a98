from __future__ import annotations

import pytest

from harness.cancellations.grounds import Kind, open_ground
from harness.cancellations.inserting import INSERTING
from harness.cancellations.scenario import Scenario
from harness.cancellations.sweeper import Sweeper


@pytest.mark.parametrize("kind", ["local", "mem"])
@pytest.mark.parametrize("scenario", INSERTING, ids=lambda scenario: scenario.name)
async def test_what_is_inserted_is_whole_or_absent(
    scenario: Scenario, kind: Kind
) -> None:
    sweeper = Sweeper()
    async with open_ground(kind) as ground:
        for nbytes in scenario.sizes:
            await scenario.run(ground, sweeper, nbytes)
    assert sweeper.cancelled
