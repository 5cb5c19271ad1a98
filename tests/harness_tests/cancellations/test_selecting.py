from __future__ import annotations

from typing import Final

import pytest

from harness.cancellations.grounds import Kind, open_ground
from harness.cancellations.scenario import Scenario
from harness.cancellations.selecting import SELECTING
from harness.cancellations.sweeper import Sweeper

KINDS: Final[tuple[Kind, ...]] = ("local", "mem", "map")


@pytest.mark.parametrize(
    ("scenario", "kind"),
    [
        pytest.param(scenario, kind, id=f"{scenario.name}-{kind}")
        for scenario in SELECTING
        for kind in KINDS
        # Of `map`, which is tcp but for what is selected, no scenario speaks.
        if ("tcp" if kind == "map" else kind) in scenario.kinds
    ],
)
async def test_what_was_held_is_there_again(scenario: Scenario, kind: Kind) -> None:
    sweeper = Sweeper()
    async with open_ground(kind) as ground:
        for nbytes in scenario.sizes:
            await scenario.run(ground, sweeper, nbytes)
    assert sweeper.cancelled
