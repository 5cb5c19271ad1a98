"""Every public coroutine, cancelled wherever it waits, and in the tick it is done."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import CodeType
from typing import Any

import pytest

from asynckv.testing.cancellations.coroutines import codes_of_coroutines
from asynckv.testing.cancellations.everything import run_scenarios
from asynckv.testing.cancellations.grounds import GROUNDS, OVER_LINKS, Kind, open_ground
from asynckv.testing.cancellations.sweeper import Sweeper
from asynckv.testing.certificates import Authority

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
    *("MemTransport.", "InlineTransport.", "NcclTransport."),
)
BY_TCP = ("join_group:", "open:", "Group.", "LookupByRole.")
BY_TLS = ("Server.__aenter__", "PipeListener.__aenter__")  # elsewhere they never wait
ELSEWHERE: dict[Kind, tuple[str, ...]] = {
    "mem": (*HERE, *BY_TCP, *BY_TLS, "Peer.__aenter__"),
    "tcp": (*HERE, *BY_TLS),
    "unix": (*HERE, *BY_TCP, *BY_TLS),
    "tls": HERE,
}
"""What a ground has not, or what waits for nothing there."""

BY_CHANCE = ("MemTransport.quiesce", "NcclTransport.quiesce")
"""What they wait for may be through: tests/transports/test_mem.py stops a copy, and
tests/transports/nccl/test_transport.py cancels both kinds in every way."""


async def cancel_on(kind: Kind, authority: Authority, at_least: int) -> Sweeper:
    sweeper = Sweeper()
    options: dict[str, Any] = {"tls": authority.issue()} if kind == "tls" else {}
    async with open_ground(kind, **options) as ground:
        await run_scenarios(ground, sweeper, at_least=at_least)
    return sweeper


@pytest.mark.both_loops
async def test_no_cancellation_anywhere_breaks_a_promise(
    scale: Any, figures: Callable[[str], None], authority: Authority
) -> None:
    each_loop = scale.cancellations / 2
    total, places, public = 0, set[CodeType](), codes_of_coroutines()
    for kind in GROUNDS:
        quota = math.ceil(each_loop * SHARES[kind] / sum(SHARES.values()))
        sweeper = await cancel_on(kind, authority, quota)
        assert sweeper.cancelled >= quota
        if kind in OVER_LINKS:
            left_out = [
                name for name, code in public.items() if code not in sweeper.places
            ]
            assert [x for x in left_out if not x.startswith(ELSEWHERE[kind])] == []
        total += sweeper.cancelled
        places |= sweeper.places
        figures(
            f"{kind}: {sweeper.cancelled} cancellations in {sweeper.rounds} rounds, "
            f"in {len(sweeper.places)} coroutines"
        )
    figures(
        f"{total} cancellations in {len(places)} coroutines, "
        f"{len(public)} of them public"
    )
    left_out = [name for name, code in public.items() if code not in places]
    assert [name for name in left_out if name not in BY_CHANCE] == []
