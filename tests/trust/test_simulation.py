"""Many seeds of the simulation, and every promise kept on each of them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from harness.simulation.command import Totals
from harness.simulation.transfers import tell_transfer

pytestmark = [
    pytest.mark.trust,
    pytest.mark.longest,
    pytest.mark.multiprocess,
    pytest.mark.timeout(7200),
]

MIN_EVENTS = 2000
TRANSFERS_A_SEED = 100


def test_every_seed_keeps_the_promises(
    scale: Any, figures: Callable[[str], None]
) -> None:
    command = (
        *(sys.executable, "-m", "harness.simulation"),
        *("--seeds", f"0:{scale.simulation_seeds}"),
        *("--events", str(MIN_EVENTS)),
        *("--processes", str(os.cpu_count() or 1)),
    )
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    totals = Totals()
    totals.add(ran.stdout.splitlines()[-1])
    figures(str(totals))
    assert totals.seeds == scale.simulation_seeds
    assert totals.fewest >= MIN_EVENTS


def test_every_seed_keeps_the_promises_of_a_transfer(
    scale: Any, figures: Callable[[str], None]
) -> None:
    seeds = TRANSFERS_A_SEED * scale.simulation_seeds
    whole = sum(tell_transfer(seed).is_whole for seed in range(seeds))
    figures(f"{seeds} transfers without sockets, {whole} of them whole")
    assert whole > seeds // 2
