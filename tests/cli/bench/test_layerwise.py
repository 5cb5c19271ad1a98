from __future__ import annotations

from collections.abc import Awaitable, Callable

from asynckv.cli.bench.cases import open_tail
from asynckv.cli.bench.report import Subject
from asynckv.cli.bench.rig import Rig

Counter = Callable[[], Awaitable[int]]


async def test_every_layer_arrives_and_leaves_nothing_behind(
    rig: Rig, any_left: Counter
) -> None:
    subject = Subject("tail", "tail", "tail", "ms", False, 70_000, 3)
    async with open_tail(rig, subject, 0.0) as case:
        ours = await case.ours()
        raw, bulk = [await one() for one in case.baselines.values()]
    assert (ours.nbytes, raw.nbytes, bulk.nbytes) == (210_000, 70_000, 210_000)
    assert min(ours.value, raw.value, bulk.value) > 0
    assert await any_left() == 0
