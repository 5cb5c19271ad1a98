from __future__ import annotations

import asyncio

from asynckv.testing.blocked import until_blocked
from harness.simulation.stacks import where


async def test_each_place_on_the_way_is_named() -> None:
    async def inner() -> None:
        await asyncio.get_running_loop().create_future()

    async def outer() -> None:
        await inner()

    coroutine = outer()
    task = asyncio.create_task(coroutine)
    await until_blocked(task)
    places = [place.rpartition(".")[2] for place in where(coroutine).split(" > ")]
    assert [place.partition(":")[0] for place in places] == ["outer", "inner"]
    task.cancel()


def test_nothing_waits_nowhere() -> None:
    assert where(None) == "nowhere"
