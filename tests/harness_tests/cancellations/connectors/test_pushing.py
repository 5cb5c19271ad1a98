from __future__ import annotations

from typing import Any

import pytest

from harness.cancellations.connectors.grounds import (
    LARGE,
    P2PGround,
    open_p2p,
)
from harness.cancellations.connectors.pushing import PUSHING
from harness.cancellations.connectors.scenario import ConnectorScenario
from harness.cancellations.sweeper import Sweeper


@pytest.mark.parametrize("scenario", PUSHING, ids=lambda scenario: scenario.name)
async def test_what_leaves_a_gpu_keeps_no_memory_when_it_was_cancelled(
    scenario: ConnectorScenario[P2PGround],
) -> None:
    sweeper = Sweeper()
    places: Any = {"on_gpus": True, "are_buffers_there": True}
    async with open_p2p("unix", "push", model=LARGE, **places) as ground:
        await scenario.run(ground, sweeper)
    assert sweeper.cancelled
