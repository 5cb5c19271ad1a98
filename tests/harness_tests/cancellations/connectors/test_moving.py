from __future__ import annotations

import pytest

from harness.cancellations.connectors.grounds import P2PGround, open_p2p
from harness.cancellations.connectors.moving import MOVING
from harness.cancellations.connectors.scenario import ConnectorScenario
from harness.cancellations.sweeper import Sweeper


@pytest.mark.parametrize("scenario", MOVING, ids=lambda scenario: scenario.name)
async def test_blocks_are_quiet_when_a_transfer_was_cancelled(
    scenario: ConnectorScenario[P2PGround],
) -> None:
    sweeper = Sweeper()
    async with open_p2p("mem") as ground:
        await scenario.run(ground, sweeper)
    assert sweeper.cancelled
