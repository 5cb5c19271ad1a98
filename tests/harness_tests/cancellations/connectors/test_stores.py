from __future__ import annotations

import pytest

from harness.cancellations.connectors.grounds import LARGE
from harness.cancellations.connectors.scenario import ConnectorScenario
from harness.cancellations.connectors.store_grounds import (
    StoreGround,
    open_store_ground,
)
from harness.cancellations.connectors.stores import STORES, a_save_of_blocks
from harness.cancellations.sweeper import Sweeper


@pytest.mark.parametrize("scenario", STORES, ids=lambda scenario: scenario.name)
async def test_the_store_holds_what_was_saved_and_nothing_else(
    scenario: ConnectorScenario[StoreGround],
) -> None:
    sweeper = Sweeper()
    async with open_store_ground("mem") as ground:
        await scenario.run(ground, sweeper)
    assert sweeper.cancelled


async def test_a_save_from_a_gpu_goes_on_after_it_was_cancelled() -> None:
    sweeper = Sweeper()
    async with open_store_ground("unix", LARGE, on_gpus=True) as ground:
        await a_save_of_blocks(ground, sweeper)
    assert sweeper.cancelled
