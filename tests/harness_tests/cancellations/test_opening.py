from __future__ import annotations

import pytest

from harness.cancellations.grounds import Kind, open_ground
from harness.cancellations.opening import OPENING
from harness.cancellations.scenario import Scenario
from harness.cancellations.sweeper import Sweeper


@pytest.mark.parametrize("kind", ["mem", pytest.param("tcp", marks=pytest.mark.chaos)])
@pytest.mark.parametrize("scenario", OPENING, ids=lambda scenario: scenario.name)
async def test_it_is_open_or_as_if_it_had_never_begun(
    scenario: Scenario, kind: Kind
) -> None:
    sweeper = Sweeper()
    async with open_ground(kind) as ground:
        for nbytes in scenario.sizes:
            await scenario.run(ground, sweeper, nbytes)
    assert sweeper.cancelled
