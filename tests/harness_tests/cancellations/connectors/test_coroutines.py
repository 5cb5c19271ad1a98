from __future__ import annotations

from asynckv.connectors.p2p.load import P2PLoad
from harness.cancellations.connectors.coroutines import (
    ONE_STEP,
    codes_of_coroutines,
    public_coroutines,
    uncovered,
)
from harness.cancellations.connectors.everything import SCENARIOS

NAMES = {name for name, _, _ in public_coroutines()}
COVERED = [name for scenario in SCENARIOS for name in scenario.covers]


def test_every_public_coroutine_is_cancelled_by_some_scenario() -> None:
    assert uncovered(COVERED) == []


def test_a_coroutine_that_no_scenario_is_about_is_told() -> None:
    left = [name for name in COVERED if name != "StoreWorker.flush"]
    assert uncovered(left) == ["StoreWorker.flush"]


def test_what_is_covered_exists() -> None:
    known = {alias for _, names, _ in public_coroutines() for alias in names}
    assert [name for name in (*COVERED, *ONE_STEP) if name not in known] == []


def test_codes_are_of_what_runs() -> None:
    codes = codes_of_coroutines()
    assert codes["P2PLoad.run"] is P2PLoad.run.__code__
    assert "KVConnectorWorker.wait_for_save" not in codes
    assert {"release", "KVConnectorWorker.shutdown", "PackedBlocks.gather"} <= NAMES
