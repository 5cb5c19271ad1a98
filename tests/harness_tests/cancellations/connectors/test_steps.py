from __future__ import annotations

import pytest

from harness.cancellations.connectors.grounds import P2PGround, open_p2p
from harness.cancellations.connectors.scenario import ConnectorScenario
from harness.cancellations.connectors.steps import STEPS
from harness.cancellations.sweeper import Sweeper


@pytest.mark.parametrize("scenario", STEPS, ids=lambda scenario: scenario.name)
async def test_a_cancelled_wait_leaves_transfers_as_they_are(
    scenario: ConnectorScenario[P2PGround],
) -> None:
    sweeper = Sweeper()
    async with open_p2p("mem") as ground:
        await scenario.run(ground, sweeper)
    assert sweeper.cancelled
