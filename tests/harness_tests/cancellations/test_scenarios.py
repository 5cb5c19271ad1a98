"""Each public coroutine is cancelled wherever it waits, on one ground or several."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

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
from harness.cancellations.connectors.grounds import LARGE, open_p2p
from harness.cancellations.connectors.store_grounds import open_store_ground
from harness.cancellations.grounds import open_ground
from harness.cancellations.sweeper import Kind, Scenario, Sweeper, scenarios_of

CHAOS, TRUST = (pytest.mark.chaos,), (pytest.mark.trust,)

# By a map it is as by tcp, but for what is selected.
SELECTS = tuple(one for one in scenarios_of(lookups) if "insert" not in one.name)
WHERE: list[tuple[tuple[Scenario, ...], tuple[Kind, ...], Any]] = [
    (scenarios_of(lookups), ("local", "mem"), ()),
    ((lookups.a_huge_entry,), ("tcp",), ()),
    (SELECTS, ("map",), ()),
    (scenarios_of(moving), ("local", "mem", "tcp"), ()),
    (scenarios_of(nodes), ("tcp",), ()),
    (scenarios_of(opening), ("mem",), ()),
    (scenarios_of(opening), ("tcp",), CHAOS),
    (scenarios_of(piping), ("mem",), ()),
    (scenarios_of(storing), ("local", "mem"), ()),
    (scenarios_of(streaming), ("local", "mem"), ()),
]


@pytest.mark.parametrize(
    ("scenario", "kind"),
    [
        pytest.param(scenario, kind, id=f"{scenario.name}-{kind}", marks=marks)
        for scenarios, kinds, marks in WHERE
        for scenario in scenarios
        for kind in kinds
        if ("tcp" if kind == "map" else kind) in scenario.kinds
    ],
)
async def test_what_is_cancelled_is_done_or_as_if_it_had_never_begun(
    scenario: Scenario, kind: Kind
) -> None:
    sweeper = Sweeper()
    async with open_ground(kind) as ground:
        for nbytes in scenario.sizes:
            await scenario.run(ground, sweeper, nbytes)
    assert sweeper.cancelled


@pytest.mark.parametrize(
    "scenario",
    [
        pytest.param(scenario, id=scenario.name, marks=marks)
        for module, its_marks in ((on_gpus, CHAOS), (pipes_on_gpus, TRUST))
        for scenario in scenarios_of(module)
        for marks in (its_marks if scenario is not on_gpus.a_staged_insert else (),)
    ],
)
async def test_what_is_cancelled_on_a_gpu_keeps_none_of_it(scenario: Scenario) -> None:
    sweeper = Sweeper()
    async with open_ground("local") as ground:
        await scenario.run(ground, sweeper, scenario.sizes[-1])
    assert sweeper.cancelled > 3


Open = Callable[[], AbstractAsyncContextManager[Any]]


def pushed_to_gpus() -> AbstractAsyncContextManager[Any]:
    on_gpus: Any = {"on_gpus": True, "are_buffers_there": True}
    return open_p2p("unix", "push", model=LARGE, **on_gpus)


def stored_from_a_gpu() -> AbstractAsyncContextManager[Any]:
    return open_store_ground("unix", LARGE, on_gpus=True, chunk_tokens=48)


def stored_by_three_blocks() -> AbstractAsyncContextManager[Any]:
    return open_store_ground("mem", LARGE, chunk_tokens=48)


OF_CONNECTORS: list[tuple[tuple[Scenario, ...], Open, Any]] = [
    (scenarios_of(dialling), lambda: open_p2p("mem"), ()),
    (scenarios_of(moving_blocks), lambda: open_p2p("mem"), ()),
    (scenarios_of(steps), lambda: open_p2p("mem"), ()),
    (scenarios_of(pushing), pushed_to_gpus, ()),
    (scenarios_of(several), lambda: several.open_several("mem"), TRUST),
    (scenarios_of(stores), lambda: open_store_ground("mem"), ()),
    ((stores.a_save_of_blocks,), stored_from_a_gpu, ()),
    ((stores.a_save_of_blocks, stores.a_load_of_blocks), stored_by_three_blocks, ()),
]


@pytest.mark.parametrize(
    ("scenario", "opening"),
    [
        pytest.param(
            *(scenario, opening),
            id=scenario.name,
            marks=TRUST if scenario.name.startswith("a_workers_") else marks,
        )
        for scenarios, opening, marks in OF_CONNECTORS
        for scenario in scenarios
    ],
)
async def test_what_is_cancelled_of_a_connector_moves_its_blocks_or_leaves_them(
    scenario: Scenario, opening: Open
) -> None:
    sweeper = Sweeper()
    async with opening() as ground:
        await scenario.run(ground, sweeper)
    assert sweeper.cancelled
