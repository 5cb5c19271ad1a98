from __future__ import annotations

import pytest

from asynckv.testing.cancellations.grounds import Kind, open_ground
from asynckv.testing.cancellations.scenario import Scenario
from asynckv.testing.cancellations.selecting import SELECTING
from asynckv.testing.cancellations.sweeper import Sweeper


@pytest.mark.parametrize("kind", ["local", "mem", "map"])
@pytest.mark.parametrize("scenario", SELECTING, ids=lambda scenario: scenario.name)
async def test_what_was_held_is_there_again(scenario: Scenario, kind: Kind) -> None:
    sweeper = Sweeper()
    if ("tcp" if kind == "map" else kind) not in scenario.kinds:
        return
    async with open_ground(kind) as ground:
        for nbytes in scenario.sizes:
            await scenario.run(ground, sweeper, nbytes)
    assert sweeper.cancelled
