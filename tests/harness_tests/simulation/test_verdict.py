from __future__ import annotations

import asyncio
import os
import subprocess
import sys

import pytest

from harness.simulation.verdict import simulate

SEEDS = (7, 21)


def test_a_seed_replays_byte_for_byte() -> None:
    first, second = (simulate(SEEDS[0], min_events=300) for _ in range(2))
    assert list(first.story.text()) == list(second.story.text())
    assert str(first) == str(second)


@pytest.mark.chaos
@pytest.mark.multiprocess
def test_a_seed_replays_in_another_process_with_other_hashes() -> None:
    code = (
        "from harness.simulation.verdict import simulate\n"
        f"print(*(simulate(seed, min_events=300) for seed in {SEEDS}), sep='|')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONHASHSEED": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    here = "|".join(str(simulate(seed, min_events=300)) for seed in SEEDS)
    assert done.stdout == f"{here}\n"


def test_other_seeds_tell_other_stories() -> None:
    digests = {simulate(seed, min_events=100).story.digest() for seed in (1, 2)}
    assert len(digests) == 2


def test_a_seed_keeps_its_promises_and_says_so() -> None:
    verdict = simulate(1)
    assert verdict.broken == ()
    assert verdict.events >= 2000
    assert str(verdict).startswith("seed 1: kept; ")


async def test_it_runs_beside_a_loop_that_runs_already() -> None:
    verdict = simulate(2, min_events=100)
    assert verdict.broken == ()
    assert asyncio.get_running_loop().is_running()
