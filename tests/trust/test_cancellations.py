"""Every public coroutine, cancelled wherever it waits, and in the tick it is done."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from types import CodeType
from typing import Any

import pytest

from asynckv.testing.certificates import Authority
from harness.cancellations.coroutines import codes_of_coroutines
from harness.cancellations.everything import run_scenarios
from harness.cancellations.grounds import Kind, open_ground
from harness.cancellations.sweeper import Sweeper

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


async def cancel_on(kind: Kind, authority: Authority, at_least: int) -> Sweeper:
    sweeper = Sweeper()
    options: dict[str, Any] = {"tls": authority.issue()} if kind == "tls" else {}
    async with open_ground(kind, **options) as ground:
        await run_scenarios(ground, sweeper, at_least=at_least)
    return sweeper


def left_out_on(kind: Kind, reached: set[CodeType]) -> list[str]:
    """Name what is public, waits there, and was not cancelled."""
    public = codes_of_coroutines()
    return [
        name
        for name, code in public.items()
        if code not in reached and name not in BY_CHANCE and waits_on(kind, name)
    ]


def waits_on(kind: Kind, name: str) -> bool:
    for transport, its_kind in TRANSPORTS.items():
        if name.startswith(transport):
            return kind == its_kind
    if kind == "local":
        return name.startswith(HERE)
    return not name.startswith(ELSEWHERE[kind])


@pytest.fixture
def sweep(
    scale: Any, figures: Callable[[str], None], authority: Authority
) -> Callable[[Kind], Awaitable[None]]:
    async def sweep(kind: Kind) -> None:
        each_loop = scale.cancellations / 2
        quota = math.ceil(each_loop * SHARES[kind] / sum(SHARES.values()))
        sweeper = await cancel_on(kind, authority, quota)
        figures(
            f"{kind}: {sweeper.cancelled} cancellations in {sweeper.rounds} rounds, "
            f"in {len(sweeper.places)} coroutines"
        )
        assert sweeper.cancelled >= quota
        assert left_out_on(kind, sweeper.places) == []

    return sweep


@pytest.mark.both_loops
@pytest.mark.parametrize("kind", ["tcp", "unix"])
async def test_no_cancellation_over_sockets_breaks_a_promise(
    kind: Kind, sweep: Callable[[Kind], Awaitable[None]]
) -> None:
    await sweep(kind)


# Without a socket uvloop does what asyncio does, and by TLS what it does by TCP: a
# release tries it all the same.
@pytest.mark.both_loops(only_at="chaos")
@pytest.mark.parametrize("kind", ["tls", "local", "mem"])
async def test_no_cancellation_by_tls_or_within_a_process_breaks_a_promise(
    kind: Kind, sweep: Callable[[Kind], Awaitable[None]]
) -> None:
    await sweep(kind)
