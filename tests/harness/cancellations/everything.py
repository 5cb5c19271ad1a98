"""All scenarios, and runs of them that cancel as often as they are told."""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from harness.cancellations import (
    lookups,
    moving,
    nodes,
    on_gpus,
    opening,
    pipes_on_gpus,
    piping,
    storing,
    streaming,
)
from harness.cancellations.connectors import (
    dialling,
    moving as moving_blocks,
    pushing,
    several,
    steps,
    stores,
)
from harness.cancellations.connectors.grounds import LARGE, SMALL, open_p2p
from harness.cancellations.connectors.store_grounds import open_store_ground
from harness.cancellations.grounds import Ground, one_thread_of_torch
from harness.cancellations.sweeper import (
    LARGE as LARGE_NBYTES,
    Scenario,
    Sweeper,
    scenarios_of,
)

__all__ = (
    "COSTLY_GROUNDS",
    "GROUNDS_OF_CONNECTORS",
    "OF_CONNECTORS",
    "SCENARIOS",
    "open_ground_of_connectors",
    "run_scenarios",
    "scenarios_on",
)

SCENARIOS: Final = scenarios_of(
    lookups,
    streaming,
    storing,
    piping,
    opening,
    nodes,
    moving,
    on_gpus,
    pipes_on_gpus,
)

_P2P: Final = scenarios_of(steps, moving_blocks, dialling)
_BY_GROUND: Final[Mapping[str, Sequence[Scenario]]] = {
    "store": scenarios_of(stores),
    "several": scenarios_of(several),
    "pushed": (*_P2P, *scenarios_of(pushing)),
}
OF_CONNECTORS: Final = tuple(
    {id(one): one for some in _BY_GROUND.values() for one in some}.values()
)

_BUFFERS_THERE: Final[dict[str, Any]] = {
    "model": LARGE,
    "on_gpus": True,
    "are_buffers_there": True,
}
GROUNDS_OF_CONNECTORS: Final[Mapping[str, Callable[[], Any]]] = {
    "pull": lambda: open_p2p("unix"),
    "pull large": lambda: open_p2p("tcp", model=LARGE),
    "push": lambda: open_p2p("tcp", "push"),
    "push large": lambda: open_p2p("unix", "push", model=LARGE),
    "to two ranks": lambda: open_p2p("tcp", sizes=(1, 2)),
    "from two ranks": lambda: open_p2p("unix", "push", (2, 1)),
    "on GPUs": lambda: open_p2p("unix", "push", on_gpus=True),
    "buffers on GPUs": lambda: open_p2p("unix", **_BUFFERS_THERE),
    "pushed to GPUs": lambda: open_p2p("unix", "push", **_BUFFERS_THERE),
    "pushed between GPUs": lambda: open_p2p(
        "unix", "push", are_apart=True, **_BUFFERS_THERE
    ),
    "on GPUs from two ranks": lambda: open_p2p("unix", "push", (2, 1), on_gpus=True),
    "store": lambda: open_store_ground("tcp", SMALL),
    "store large": lambda: open_store_ground("tcp", LARGE, chunk_tokens=48),
    "store on GPUs": lambda: open_store_ground(
        "tcp", LARGE, on_gpus=True, chunk_tokens=48
    ),
    "several": lambda: several.open_several("unix"),
}
"""Over tcp and unix sockets, both directions; from several ranks, and to several."""

COSTLY_GROUNDS: Final[Mapping[str, tuple[str, ...]]] = {
    "buffers on GPUs": ("a_load",),
    "on GPUs from two ranks": ("a_load",),
    "pushed to GPUs": ("a_take",),
    "pushed between GPUs": (),
    "store on GPUs": (),
}
"""They take longer than all others together. With them, what is done nowhere else."""

_LARGE_EVERY: Final = 3
_COSTLY_EVERY: Final = {False: 10, True: 4}
"""So many passes have one with large tensors, and one with all that is costly."""

_Sized = tuple[Scenario, tuple[int, ...]]


def scenarios_on(ground: Ground) -> Iterator[_Sized]:
    """Yield each scenario that makes sense there, with each of its sizes."""
    for scenario in SCENARIOS:
        if ground.kind in scenario.kinds:
            for nbytes in scenario.sizes:
                yield scenario, (nbytes,)


@contextlib.asynccontextmanager
async def open_ground_of_connectors(
    name: str, *, is_short: bool = False
) -> AsyncIterator[tuple[Any, list[_Sized]]]:
    """Open one of these grounds, with the scenarios that make sense there.

    ``is_short`` leaves out what is done elsewhere too where that costs much.
    """
    scenarios = _BY_GROUND.get(name.split()[0], _P2P)
    chosen = COSTLY_GROUNDS.get(name, ()) if is_short else ()
    async with one_thread_of_torch(), GROUNDS_OF_CONNECTORS[name]() as ground:
        yield (
            ground,
            [
                (one, ())
                for one in scenarios
                if not (is_short and name in COSTLY_GROUNDS) or one.name in chosen
            ],
        )


async def run_scenarios(
    scenarios: Sequence[_Sized],
    ground: Any,
    sweeper: Sweeper,
    *,
    at_least: int = 0,
    seed: int = 0,
) -> None:
    """Sweep each scenario; then again and again, at random, until it is enough.

    :raises BaseException: a promise was broken; the notes name scenario and seed
    """
    for scenario, size in scenarios:
        await _run(scenario, size, ground, sweeper, "first pass")
    for number in itertools.count():
        for scenario, size in scenarios:
            if sweeper.cancelled >= at_least:
                return
            if _has_its_turn(scenario, size, number):
                name = f"{seed} {number}"
                sweeper.chance = random.Random(f"{name} {scenario.name} {size}")
                await _run(scenario, size, ground, sweeper, name)


def _has_its_turn(scenario: Scenario, size: tuple[int, ...], number: int) -> bool:
    is_late = (number + 1) % _COSTLY_EVERY[not size]
    if scenario.is_costly and is_late:
        return False
    is_small = size < (LARGE_NBYTES,)
    return is_small or number % _LARGE_EVERY == 0 or not is_late


async def _run(
    scenario: Scenario,
    size: tuple[int, ...],
    ground: Any,
    sweeper: Sweeper,
    name: str,
) -> None:
    try:
        await scenario.run(ground, sweeper, *size)
    except BaseException as exc:
        exc.add_note(f"{name} on {getattr(ground, 'kind', 'a ground of connectors')}")
        raise
