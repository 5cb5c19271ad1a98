from __future__ import annotations

import asyncio

from asynckv.testing.blocked import until_blocked
from asynckv.waits.replies import Waits


async def test_it_ends_when_it_is_so() -> None:
    waits, found = Waits(asyncio.get_running_loop()), list[int]()
    task = asyncio.create_task(waits.wait(lambda: bool(found), timeout_s=None))
    await until_blocked(task)
    waits.settle()
    found.append(1)
    waits.settle()
    await task


async def test_it_does_not_wait_for_what_is_so() -> None:
    await Waits(asyncio.get_running_loop()).wait(lambda: True, timeout_s=None)


async def test_a_bounded_wait_ends_in_time() -> None:
    await Waits(asyncio.get_running_loop()).wait(lambda: False, timeout_s=0.01)


async def test_who_is_cancelled_is_forgotten() -> None:
    waits = Waits(asyncio.get_running_loop())
    task = asyncio.create_task(waits.wait(lambda: False, timeout_s=None))
    await until_blocked(task)
    task.cancel()
    await asyncio.wait({task})
    waits.settle()
    assert task.cancelled()
