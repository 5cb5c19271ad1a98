from __future__ import annotations

import asyncio

import pytest

from asynckv.testing.blocked import cancel_before_each, until, until_blocked
from asynckv.waits.waiting import wait_shielded

pytestmark = pytest.mark.both_loops


async def steps(count: int, seen: list[int]) -> None:
    for step in range(count):
        seen.append(step)
        await asyncio.sleep(0)
    await asyncio.get_running_loop().create_future()


async def test_waits_until_a_task_stays_where_it_is() -> None:
    seen: list[int] = []
    task = asyncio.create_task(steps(20, seen))
    await until_blocked(task)
    assert len(seen) == 20
    task.cancel()


async def test_a_task_that_is_done_is_waited_for_no_longer() -> None:
    task = asyncio.create_task(asyncio.sleep(0, "done"))
    await until_blocked(task)
    assert task.result() == "done"


async def test_waits_for_a_predicate() -> None:
    seen: list[int] = []
    task = asyncio.create_task(steps(5, seen))
    await until(lambda: len(seen) == 3)
    assert len(seen) == 3
    task.cancel()


async def test_gives_up_on_what_never_comes() -> None:
    with pytest.raises(TimeoutError, match=r"after 0\.01 s: .*test_blocked\.py"):
        await until(lambda: False, timeout_s=0.01)


async def test_whoever_waits_for_only_some_is_noticed() -> None:
    loop = asyncio.get_running_loop()
    for count in (1, 2):
        ends = [loop.create_future() for _ in range(2)]
        quiet = asyncio.gather(*ends[:count])
        waiting = loop.create_task(wait_shielded(quiet))
        if count == 2:
            await cancel_before_each(waiting, ends)
        else:
            with pytest.raises(AssertionError, match="not waited for all"):
                await cancel_before_each(waiting, ends)
        assert waiting.cancelled()
