from __future__ import annotations

from collections.abc import Awaitable, Callable

from asynckv.cli.bench.cases import EDGES_MS, open_lag, tick
from asynckv.cli.bench.report import Subject
from asynckv.cli.bench.rig import Rig

Counter = Callable[[], Awaitable[int]]


async def test_every_tick_is_noted() -> None:
    assert len(await tick(4)) == 4


async def test_payload_moves_for_as_long_as_the_ticker_runs(
    rig: Rig, any_left: Counter
) -> None:
    subject = Subject("lag", "lag", "lag", "ms", False, 70_000, 2)
    async with open_lag(rig, subject, 5) as case:
        ours, idle = await case.ours(), await case.baselines["idle loop"]()
    assert (len(ours.calls), len(idle.calls)) == (5, 5)
    assert ours.nbytes >= 140_000
    assert idle.nbytes == 0
    assert ours.value == max(ours.calls)
    assert await any_left() == 0


def test_the_bins_grow() -> None:
    assert list(EDGES_MS) == sorted(set(EDGES_MS))
