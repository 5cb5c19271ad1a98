"""Each public coroutine is cancelled wherever it waits, on one ground or several."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

from harness.cancellations.chunks import CHUNKS
from harness.cancellations.connectors.closing import CLOSING
from harness.cancellations.connectors.dialling import DIALLING
from harness.cancellations.connectors.grounds import LARGE, open_p2p
from harness.cancellations.connectors.moving import MOVING as MOVING_BLOCKS
from harness.cancellations.connectors.pushing import PUSHING
from harness.cancellations.connectors.scenario import ConnectorScenario
from harness.cancellations.connectors.several import SEVERAL, open_several
from harness.cancellations.connectors.steps import STEPS
from harness.cancellations.connectors.store_grounds import open_store_ground
from harness.cancellations.connectors.stores import STORES, a_save_of_blocks
from harness.cancellations.grounds import Kind, open_ground
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

CHAOS, TRUST = (pytest.mark.chaos,), (pytest.mark.trust,)

WHERE: list[tuple[tuple[Scenario, ...], tuple[Kind, ...], Any]] = [
    (CHUNKS, ("mem", "tcp"), ()),
    (GROUPING, ("tcp",), ()),
    (INSERTING, ("local", "mem"), ()),
    (LEAVING, ("mem",), ()),
    (MOVING, ("local", "mem", "tcp"), ()),
    (NODES, ("tcp",), ()),
    (OPENING, ("mem",), ()),
    (OPENING, ("tcp",), CHAOS),
    (PIPE_ENDS, ("mem",), ()),
    (PIPING, ("mem",), ()),
    (SELECTING, ("local", "mem", "map"), ()),
    (STORING, ("local", "mem"), ()),
    (STREAMING, ("local", "mem"), ()),
]
ON_GPUS_OF_THEIR_OWN: list[tuple[tuple[Scenario, ...], Any]] = [
    (ON_GPUS, CHAOS),
    (PIPING_ON_GPUS, TRUST),
    (INSERTING_ON_GPUS, CHAOS),
    (STAGING_ON_GPUS, ()),
    (STREAMING_ON_GPUS, CHAOS),
]


def is_possible(scenario: Scenario, kind: Kind) -> bool:
    """Only a query is made in vain where its scenario makes no sense."""
    # Of `map`, which is tcp but for what is selected, no scenario speaks.
    spoken_of: Kind = "tcp" if kind == "map" else kind
    return scenario not in SELECTING or spoken_of in scenario.kinds


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
    return open_store_ground("unix", LARGE, on_gpus=True)


OF_CONNECTORS: list[tuple[Any, Open, Any]] = [
    (CLOSING, open_by_mem, TRUST),
    (DIALLING, open_by_mem, ()),
    (MOVING_BLOCKS, open_by_mem, ()),
    (STEPS, open_by_mem, ()),
    (PUSHING, open_pushed_to_gpus, ()),
    (SEVERAL, lambda: open_several("mem"), TRUST),
    (STORES, lambda: open_store_ground("mem"), ()),
    ([ConnectorScenario(a_save_of_blocks, ())], open_stored_from_a_gpu, ()),
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
