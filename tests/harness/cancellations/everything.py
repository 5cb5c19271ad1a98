"""All scenarios, and a run of them that cancels as often as it is told."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Final

from harness.cancellations.chunks import CHUNKS
from harness.cancellations.entries import LARGE
from harness.cancellations.grounds import Ground
from harness.cancellations.grouping import GROUPING
from harness.cancellations.inserting import INSERTING
from harness.cancellations.inserting_on_gpus import INSERTING_ON_GPUS
from harness.cancellations.leaving import LEAVING
from harness.cancellations.moving import MOVING
from harness.cancellations.nodes import NODES
from harness.cancellations.on_gpus import ON_GPUS
from harness.cancellations.opening import OPENING
from harness.cancellations.pipe_ends import PIPE_ENDS
from harness.cancellations.piping import PIPING
from harness.cancellations.piping_on_gpus import PIPING_ON_GPUS
from harness.cancellations.scenario import Scenario
from harness.cancellations.selecting import SELECTING
from harness.cancellations.staging_on_gpus import STAGING_ON_GPUS
from harness.cancellations.storing import STORING
from harness.cancellations.streaming import STREAMING
from harness.cancellations.streaming_on_gpus import STREAMING_ON_GPUS
from harness.cancellations.sweeper import Sweeper

__all__ = ("SCENARIOS", "run_scenarios", "scenarios_on")

SCENARIOS: Final[tuple[Scenario, ...]] = (
    *INSERTING,
    *SELECTING,
    *STREAMING,
    *STORING,
    *PIPING,
    *CHUNKS,
    *OPENING,
    *NODES,
    *LEAVING,
    *PIPE_ENDS,
    *GROUPING,
    *MOVING,
    *ON_GPUS,
    *PIPING_ON_GPUS,
    *INSERTING_ON_GPUS,
    *STAGING_ON_GPUS,
    *STREAMING_ON_GPUS,
)

_LARGE_EVERY: Final = 3
_COSTLY_EVERY: Final = 10
"""So many passes have one with large tensors, and one with all that is costly."""


def scenarios_on(ground: Ground) -> Iterator[tuple[Scenario, int]]:
    """Yield each scenario that makes sense there, with each of its sizes."""
    for scenario in SCENARIOS:
        if ground.kind in scenario.kinds:
            for nbytes in scenario.sizes:
                yield scenario, nbytes


async def run_scenarios(
    ground: Ground, sweeper: Sweeper, *, at_least: int = 0, seed: int = 0
) -> None:
    """Sweep each scenario; then again and again, at random, until it is enough.

    :raises BaseException: a promise was broken; the notes name scenario and seed
    """
    for scenario, nbytes in scenarios_on(ground):
        await _run(scenario, nbytes, ground, sweeper, "first pass")
    for number in itertools.count():
        for scenario, nbytes in scenarios_on(ground):
            if sweeper.cancelled >= at_least:
                return
            if not _has_its_turn(scenario, nbytes, number):
                continue
            name = f"{seed} {number}"
            sweeper.chance = random.Random(f"{name} {scenario.name} {nbytes}")
            await _run(scenario, nbytes, ground, sweeper, name)


def _has_its_turn(scenario: Scenario, nbytes: int, number: int) -> bool:
    is_late = (number + 1) % _COSTLY_EVERY
    if scenario.is_costly and is_late:
        return False
    return nbytes < LARGE or number % _LARGE_EVERY == 0 or not is_late


async def _run(
    scenario: Scenario, nbytes: int, ground: Ground, sweeper: Sweeper, name: str
) -> None:
    try:
        await scenario.run(ground, sweeper, nbytes)
    except BaseException as exc:
        exc.add_note(f"{name} {scenario.name} {nbytes} on {ground.kind}")
        raise
