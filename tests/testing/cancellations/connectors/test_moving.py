from __future__ import annotations

import pytest

from asynckv.testing.cancellations.connectors.grounds import P2PGround, open_p2p
from asynckv.testing.cancellations.connectors.moving import MOVING
from asynckv.testing.cancellations.connectors.scenario import ConnectorScenario
from asynckv.testing.cancellations.sweeper import Sweeper


@pytest.mark.parametrize("scenario", MOVING, ids=lambda scenario: scenario.name)
async def test_blocks_are_quiet_when_a_transfer_was_cancelled(
    scenario: ConnectorScenario[P2PGround],
) -> None:
    sweeper = Sweeper()
    async with open_p2p("mem") as ground:
        await scenario.run(ground, sweeper)
    assert sweeper.cancelled
