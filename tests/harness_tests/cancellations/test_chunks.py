from __future__ import annotations

import pytest

from harness.cancellations.chunks import CHUNKS
from harness.cancellations.grounds import Kind, open_ground
from harness.cancellations.scenario import Scenario
from harness.cancellations.sweeper import Sweeper


@pytest.mark.parametrize("kind", ["mem", "tcp"])
@pytest.mark.parametrize("scenario", CHUNKS, ids=lambda scenario: scenario.name)
async def test_memory_is_quiet_in_the_middle_of_an_entry(
    scenario: Scenario, kind: Kind
) -> None:
    sweeper = Sweeper()
    async with open_ground(kind) as ground:
        for nbytes in scenario.sizes:
            await scenario.run(ground, sweeper, nbytes)
    assert sweeper.cancelled
