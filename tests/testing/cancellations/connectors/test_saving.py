from __future__ import annotations

import pytest

from asynckv.testing.cancellations.connectors.grounds import LARGE
from asynckv.testing.cancellations.connectors.saving import SAVING
from asynckv.testing.cancellations.connectors.scenario import ConnectorScenario
from asynckv.testing.cancellations.connectors.store_grounds import (
    StoreGround,
    open_store_ground,
)
from asynckv.testing.cancellations.connectors.stores import a_save_of_blocks
from asynckv.testing.cancellations.sweeper import Sweeper


@pytest.mark.parametrize("are_apart", [False, True], ids=["one", "two"])
@pytest.mark.parametrize("scenario", SAVING, ids=lambda scenario: scenario.name)
async def test_what_leaves_for_a_store_keeps_no_memory_when_it_was_cancelled(
    scenario: ConnectorScenario[StoreGround], are_apart: bool
) -> None:
    sweeper = Sweeper()
    places = {"on_gpus": True, "are_apart": are_apart}
    async with open_store_ground("unix", LARGE, **places) as ground:
        await scenario.run(ground, sweeper)
    assert sweeper.cancelled


async def test_a_save_from_a_gpu_goes_on_after_it_was_cancelled() -> None:
    sweeper = Sweeper()
    async with open_store_ground("unix", LARGE, on_gpus=True) as ground:
        await a_save_of_blocks(ground, sweeper)
    assert sweeper.cancelled
