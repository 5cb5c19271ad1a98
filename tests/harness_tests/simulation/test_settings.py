from __future__ import annotations

import random

from harness.simulation.settings import Settings


def test_settings_come_from_chance_and_are_told() -> None:
    drawn = [
        Settings.draw(random.Random(seed), 500, is_fast=True) for seed in (1, 1, 2, 3)
    ]
    assert drawn[0] == drawn[1]
    assert len(set(drawn)) == 3
    assert "min_events=500" in str(drawn[0])
