"""Each public coroutine is cancelled wherever it waits, on one ground or several."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

from harness.cancellations import (
    chunks,
    grouping,
    inserting,
    inserting_on_gpus,
    leaving,
    moving,
    nodes,
    on_gpus,
    opening,
    pipe_ends,
    piping,
    piping_on_gpus,
    selecting,
    staging_on_gpus,
    storing,
    streaming,
    streaming_on_gpus,
)
from harness.cancellations.connectors import (
    closing,
    dialling,
    moving as moving_blocks,
    pushing,
    several,
    steps,
    stores,
)
from harness.cancellations.connectors.grounds import LARGE, open_p2p
from harness.cancellations.connectors.scenario import ConnectorScenario
from harness.cancellations.connectors.store_grounds import open_store_ground
from harness.cancellations.grounds import Kind, open_ground
from harness.cancellations.scenario import Scenario
from harness.cancellations.sweeper import Sweeper

CHAOS, TRUST = (pytest.mark.chaos,), (pytest.mark.trust,)

WHERE: list[tuple[tuple[Scenario, ...], tuple[Kind, ...], Any]] = [
    (chunks.CHUNKS, ("mem", "tcp"), ()),
    (grouping.GROUPING, ("tcp",), ()),
    (inserting.INSERTING, ("local", "mem"), ()),
    (leaving.LEAVING, ("mem",), ()),
    (moving.MOVING, ("local", "mem", "tcp"), ()),
    (nodes.NODES, ("tcp",), ()),
    (opening.OPENING, ("mem",), ()),
    (opening.OPENING, ("tcp",), CHAOS),
    (pipe_ends.PIPE_ENDS, ("mem",), ()),
    (piping.PIPING, ("mem",), ()),
    (selecting.SELECTING, ("local", "mem", "map"), ()),
    (storing.STORING, ("local", "mem"), ()),
    (streaming.STREAMING, ("local", "mem"), ()),
]
ON_GPUS_OF_THEIR_OWN: list[tuple[tuple[Scenario, ...], Any]] = [
    (on_gpus.ON_GPUS, CHAOS),
    (piping_on_gpus.PIPING_ON_GPUS, TRUST),
    (inserting_on_gpus.INSERTING_ON_GPUS, CHAOS),
    (staging_on_gpus.STAGING_ON_GPUS, ()),
    (streaming_on_gpus.STREAMING_ON_GPUS, CHAOS),
]


def is_possible(scenario: Scenario, kind: Kind) -> bool:
    """Only a query is made in vain where its scenario makes no sense."""
    # Of `map`, which is tcp but for what is selected, no scenario speaks.
    spoken_of: Kind = "tcp" if kind == "map" else kind
    return scenario not in selecting.SELECTING or spoken_of in scenario.kinds


@pytest.mark.parametrize(
    ("scenario", "kind"),
    [
        pytest.param(scenario, kind, id=f"{scenario.name}-{kind}", marks=marks)
        for scenarios, kinds, marks in WHERE
        for scenario in scenarios
        for kind in kinds
        if is_possible(scenario, kind)
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
        for scenarios, marks in ON_GPUS_OF_THEIR_OWN
        for scenario in scenarios
    ],
)
async def test_what_is_cancelled_on_a_gpu_keeps_none_of_it(scenario: Scenario) -> None:
    sweeper = Sweeper()
    async with open_ground("local") as ground:
        await scenario.run(ground, sweeper, scenario.sizes[-1])
    assert sweeper.cancelled > 3


Open = Callable[[], AbstractAsyncContextManager[Any]]


def open_by_mem() -> AbstractAsyncContextManager[Any]:
    return open_p2p("mem")


def open_pushed_to_gpus() -> AbstractAsyncContextManager[Any]:
    on_gpus: Any = {"on_gpus": True, "are_buffers_there": True}
    return open_p2p("unix", "push", model=LARGE, **on_gpus)


def open_stored_from_a_gpu() -> AbstractAsyncContextManager[Any]:
    return open_store_ground("unix", LARGE, on_gpus=True, chunk_tokens=48)


def open_stored_by_three_blocks() -> AbstractAsyncContextManager[Any]:
    return open_store_ground("mem", LARGE, chunk_tokens=48)


OF_CONNECTORS: list[tuple[Any, Open, Any]] = [
    (closing.CLOSING, open_by_mem, TRUST),
    (dialling.DIALLING, open_by_mem, ()),
    (moving_blocks.MOVING, open_by_mem, ()),
    (steps.STEPS, open_by_mem, ()),
    (pushing.PUSHING, open_pushed_to_gpus, ()),
    (several.SEVERAL, lambda: several.open_several("mem"), TRUST),
    (stores.STORES, lambda: open_store_ground("mem"), ()),
    ([ConnectorScenario(stores.a_save_of_blocks, ())], open_stored_from_a_gpu, ()),
    (
        [
            ConnectorScenario(scenario, ())
            for scenario in (stores.a_save_of_blocks, stores.a_load_of_blocks)
        ],
        open_stored_by_three_blocks,
        (),
    ),
]


@pytest.mark.parametrize(
    ("scenario", "opening"),
    [
        pytest.param(scenario, opening, id=scenario.name, marks=marks)
        for scenarios, opening, marks in OF_CONNECTORS
        for scenario in scenarios
    ],
)
async def test_what_is_cancelled_of_a_connector_moves_its_blocks_or_leaves_them(
    scenario: ConnectorScenario[Any], opening: Open
) -> None:
    sweeper = Sweeper()
    async with opening() as ground:
        await scenario.run(ground, sweeper)
    assert sweeper.cancelled
