from __future__ import annotations

from harness.cancellations.connectors.scenario import ConnectorScenario
from harness.cancellations.sweeper import Sweeper


async def nothing_happens(ground: object, sweeper: Sweeper) -> None:
    """Nothing to cancel."""


def test_it_is_named_by_what_is_to_hold() -> None:
    scenario = ConnectorScenario(nothing_happens, ("P2PWorker.start",))
    assert scenario.name == "nothing_happens"
    assert not scenario.is_costly
