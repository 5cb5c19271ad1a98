from __future__ import annotations

import pytest

from harness.cancellations.grounds import Kind, open_ground
from harness.cancellations.nodes import NODES
from harness.cancellations.scenario import Scenario
from harness.cancellations.sweeper import Sweeper


@pytest.mark.parametrize("kind", ["tcp"])
@pytest.mark.parametrize("scenario", NODES, ids=lambda scenario: scenario.name)
async def test_a_node_leaves_nothing_behind(scenario: Scenario, kind: Kind) -> None:
    sweeper = Sweeper()
    async with open_ground(kind) as ground:
        for nbytes in scenario.sizes:
            await scenario.run(ground, sweeper, nbytes)
    assert sweeper.cancelled
