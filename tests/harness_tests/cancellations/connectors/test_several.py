from __future__ import annotations

import pytest

from harness.cancellations.connectors.scenario import ConnectorScenario
from harness.cancellations.connectors.several import (
    SEVERAL,
    SeveralGround,
    open_several,
)
from harness.cancellations.sweeper import Sweeper


@pytest.mark.trust
@pytest.mark.parametrize("scenario", SEVERAL, ids=lambda scenario: scenario.name)
async def test_none_of_several_is_forgotten(
    scenario: ConnectorScenario[SeveralGround],
) -> None:
    sweeper = Sweeper()
    async with open_several("mem") as ground:
        await scenario.run(ground, sweeper)
    assert sweeper.cancelled
