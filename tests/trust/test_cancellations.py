"""Every public coroutine, cancelled wherever it waits, and in the tick it is done."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from types import CodeType
from typing import Any

import pytest

from asynckv.testing.certificates import Authority
from harness.cancellations.coroutines import OF_BUFFERS, OF_CONNECTORS
from harness.cancellations.everything import (
    COSTLY_GROUNDS,
    GROUNDS_OF_CONNECTORS,
    open_ground_of_connectors,
    run_scenarios,
    scenarios_on,
)
from harness.cancellations.grounds import open_ground
from harness.cancellations.sweeper import Kind, Sweeper

pytestmark = [
    pytest.mark.trust,
    pytest.mark.longest,
    pytest.mark.timeout(3600),
]

SHARES: dict[Kind, int] = {"local": 11, "mem": 40, "tcp": 15, "unix": 20, "tls": 14}
"""Per cent: what one passage makes where it is slow, locally (GPUs) and by TLS."""

HERE = (
    *("Local", "InMemoryBuffer.", "LookupBuffer.", "StoreBuffer."),
    *("Pipe.gpus_settled", "RemoteWriter.room", "RemoteWriter.put_staged"),
    "NcclTransport.",
)
TRANSPORTS: dict[str, Kind] = {"MemTransport.": "mem", "InlineTransport.": "tcp"}
BY_TCP = ("join_group:", "open:", "Group.", "LookupByRole.")
BY_TLS = ("Server.__aenter__", "PipeListener.__aenter__")  # elsewhere they never wait
ELSEWHERE: dict[Kind, tuple[str, ...]] = {
    "mem": (*HERE, *BY_TCP, *BY_TLS, "Peer.__aenter__"),
    "tcp": (*HERE, *BY_TLS),
    "unix": (*HERE, *BY_TCP, *BY_TLS),
    "tls": HERE,
}
"""What a ground over a link has not, or what waits for nothing there."""

BY_CHANCE = ("MemTransport.quiesce", "NcclTransport.quiesce")
"""What they wait for may be through: tests/transports/test_mem.py stops a copy, and
tests/transports/nccl/test_transport.py cancels both kinds in every way."""


CODES_OF_CONNECTORS = OF_CONNECTORS.codes()
BY_TLS_ALONE = ("MultiWorker.start", "P2PRoutes.open", "P2PWorker.start")
"""Without it, serving waits for nothing; cancelled before they begin they are."""


def waits_on(kind: Kind, name: str) -> bool:
    for transport, its_kind in TRANSPORTS.items():
        if name.startswith(transport):
            return kind == its_kind
    if kind == "local":
        return name.startswith(HERE)
    return not name.startswith(ELSEWHERE[kind])


Sweep = Callable[[Kind], Awaitable[None]]


@pytest.fixture
def sweep(scale: Any, figures: Callable[[str], None], authority: Authority) -> Sweep:
    async def sweep(kind: Kind) -> None:
        sweeper, each_loop = Sweeper(), scale.cancellations / 2
        quota = math.ceil(each_loop * SHARES[kind] / sum(SHARES.values()))
        options: dict[str, Any] = {"tls": authority.issue()} if kind == "tls" else {}
        async with open_ground(kind, **options) as ground:
            scenarios = list(scenarios_on(ground))
            await run_scenarios(scenarios, ground, sweeper, at_least=quota)
        figures(
            f"{kind}: {sweeper.cancelled} cancellations in {sweeper.rounds} rounds, "
            f"in {len(sweeper.places)} coroutines"
        )
        assert sweeper.cancelled >= quota
        left_out = [
            name
            for name, code in OF_BUFFERS.codes().items()
            if code not in sweeper.places and waits_on(kind, name)
        ]
        assert [name for name in left_out if name not in BY_CHANCE] == []

    return sweep


@pytest.mark.both_loops
@pytest.mark.parametrize("kind", ["tcp", "unix"])
async def test_no_cancellation_over_sockets_breaks_a_promise(
    kind: Kind, sweep: Sweep
) -> None:
    await sweep(kind)


# Without a socket uvloop does what asyncio does, and by TLS what it does by TCP: a
# release tries it all the same.
@pytest.mark.both_loops(only_at="chaos")
@pytest.mark.parametrize("kind", ["tls", "local", "mem"])
async def test_no_cancellation_by_tls_or_within_a_process_breaks_a_promise(
    kind: Kind, sweep: Sweep
) -> None:
    await sweep(kind)


async def test_no_cancellation_of_a_connector_breaks_a_promise(
    scale: Any, figures: Callable[[str], None]
) -> None:
    quota = -(-scale.connector_cancellations // len(GROUNDS_OF_CONNECTORS))
    is_short, total, places = not scale.costly_grounds, 0, set[CodeType]()
    for name in GROUNDS_OF_CONNECTORS:
        if is_short and not COSTLY_GROUNDS.get(name, True):
            continue
        sweeper, is_cut = Sweeper(), is_short and name in COSTLY_GROUNDS
        opened = open_ground_of_connectors(name, is_short=is_short)
        async with opened as (ground, scenarios):
            at_least = 0 if is_cut else quota
            await run_scenarios(scenarios, ground, sweeper, at_least=at_least)
        assert sweeper.cancelled >= at_least
        total += sweeper.cancelled
        places |= sweeper.places
        figures(f"{name}: {sweeper.cancelled} cancellations in {sweeper.rounds} rounds")
    public = len(CODES_OF_CONNECTORS)
    figures(f"{total} cancellations in {len(places)} coroutines, {public} public")
    left_out = [
        name for name, code in CODES_OF_CONNECTORS.items() if code not in places
    ]
    assert [name for name in left_out if name not in BY_TLS_ALONE] == []
