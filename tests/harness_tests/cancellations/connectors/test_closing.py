from __future__ import annotations

import pytest

from harness.cancellations.connectors.closing import CLOSING
from harness.cancellations.connectors.grounds import P2PGround, open_p2p
from harness.cancellations.connectors.scenario import ConnectorScenario
from harness.cancellations.sweeper import Sweeper


@pytest.mark.trust
@pytest.mark.parametrize("scenario", CLOSING, ids=lambda scenario: scenario.name)
async def test_what_was_closed_is_closed_whole(
    scenario: ConnectorScenario[P2PGround],
) -> None:
    sweeper = Sweeper()
    async with open_p2p("mem") as ground:
        await scenario.run(ground, sweeper)
    assert sweeper.cancelled
