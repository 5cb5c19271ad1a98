"""All scenarios, on every ground, and a run that cancels as often as it is told."""

from __future__ import annotations

import itertools
import random
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final, TypeAlias

from harness.cancellations.connectors.closing import CLOSING
from harness.cancellations.connectors.dialling import DIALLING
from harness.cancellations.connectors.grounds import LARGE, SMALL, open_p2p
from harness.cancellations.connectors.moving import MOVING
from harness.cancellations.connectors.pushing import PUSHING
from harness.cancellations.connectors.scenario import ConnectorScenario
from harness.cancellations.connectors.several import SEVERAL, open_several
from harness.cancellations.connectors.steps import STEPS
from harness.cancellations.connectors.store_grounds import open_store_ground
from harness.cancellations.connectors.stores import STORES
from harness.cancellations.grounds import one_thread_of_torch
from harness.cancellations.sweeper import Sweeper

__all__ = ("COSTLY_GROUNDS", "GROUNDS", "SCENARIOS", "open_ground", "run_scenarios")

_Scenarios: TypeAlias = Sequence[ConnectorScenario[Any]]

_P2P: Final[_Scenarios] = (*STEPS, *MOVING, *DIALLING, *CLOSING)
SCENARIOS: Final[tuple[ConnectorScenario[Any], ...]] = (
    *_P2P,
    *PUSHING,
    *STORES,
    *SEVERAL,
)

_Opened: TypeAlias = tuple[Any, _Scenarios]

_OPENING: Final[Mapping[str, Callable[[], Any]]] = {
    "pull": lambda: open_p2p("unix"),
    "pull large": lambda: open_p2p("tcp", model=LARGE),
    "push": lambda: open_p2p("tcp", "push"),
    "push large": lambda: open_p2p("unix", "push", model=LARGE),
    "to two ranks": lambda: open_p2p("tcp", sizes=(1, 2)),
    "from two ranks": lambda: open_p2p("unix", "push", (2, 1)),
    "on GPUs": lambda: open_p2p("unix", "push", on_gpus=True),
    "buffers on GPUs": lambda: open_p2p(
        "unix", model=LARGE, on_gpus=True, are_buffers_there=True
    ),
    "pushed to GPUs": lambda: open_p2p(
        "unix", "push", model=LARGE, on_gpus=True, are_buffers_there=True
    ),
    "pushed between GPUs": lambda: open_p2p(
        "unix",
        "push",
        model=LARGE,
        on_gpus=True,
        are_buffers_there=True,
        are_apart=True,
    ),
    "on GPUs from two ranks": lambda: open_p2p("unix", "push", (2, 1), on_gpus=True),
    "store": lambda: open_store_ground("tcp", SMALL),
    "store large": lambda: open_store_ground("tcp", LARGE, chunk_tokens=48),
    "store on GPUs": lambda: open_store_ground(
        "tcp", LARGE, on_gpus=True, chunk_tokens=48
    ),
    "several": lambda: open_several("unix"),
}

GROUNDS: Final = tuple(_OPENING)
"""Over tcp and unix sockets, both directions; from several ranks, and to several."""

COSTLY_GROUNDS: Final[Mapping[str, tuple[str, ...]]] = {
    "buffers on GPUs": ("a_load",),
    "on GPUs from two ranks": ("a_load",),
    "pushed to GPUs": ("a_take",),
    "pushed between GPUs": (),
    "store on GPUs": (),
}
"""They take longer than all others together. With them, what is done nowhere else."""

_COSTLY_EVERY: Final = 4
"""So many passes have one with all that is costly."""


@asynccontextmanager
async def open_ground(name: str) -> AsyncIterator[_Opened]:
    """Open one of these grounds, with the scenarios that make sense there."""
    opening = _OPENING.get(name)
    if opening is None:
        raise ValueError(f"there is no ground {name!r}")
    others: Mapping[str, _Scenarios] = {
        "store": STORES,
        "several": SEVERAL,
        "pushed": (*_P2P, *PUSHING),
    }
    scenarios = others.get(name.split()[0], _P2P)
    async with one_thread_of_torch(), opening() as ground:
        yield ground, scenarios


async def run_scenarios(
    name: str,
    sweeper: Sweeper,
    *,
    at_least: int = 0,
    seed: int = 0,
    is_short: bool = False,
) -> None:
    """Sweep each scenario of a ground; then again, at random, until it is enough.

    ``is_short`` leaves out what is done elsewhere too where that costs much; it is
    swept once then, however often that cancels.

    :raises BaseException: a promise was broken; the notes name scenario and seed
    """
    async with open_ground(name) as (ground, scenarios):
        if is_short and name in COSTLY_GROUNDS:
            chosen = COSTLY_GROUNDS[name]
            scenarios = [one for one in scenarios if one.name in chosen]
            at_least = 0
        for scenario in scenarios:
            await _run(scenario, ground, sweeper, f"first pass on {name}")
        for number in itertools.count():
            if sweeper.cancelled >= at_least:
                break
            for scenario in scenarios:
                if not scenario.is_costly or not (number + 1) % _COSTLY_EVERY:
                    told = f"{seed} {number} on {name}"
                    sweeper.chance = random.Random(f"{told} {scenario.name}")
                    await _run(scenario, ground, sweeper, told)


async def _run(
    scenario: ConnectorScenario[Any], ground: Any, sweeper: Sweeper, told: str
) -> None:
    try:
        await scenario.run(ground, sweeper)
    except BaseException as exc:
        exc.add_note(f"{scenario.name}: {told}")
        raise
