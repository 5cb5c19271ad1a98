from __future__ import annotations

import asyncio

import pytest

from asynckv.testing.blocked import until_blocked
from asynckv.waits.replies import Watchers


async def test_all_who_wait_are_woken_once() -> None:
    watchers = Watchers()
    waiting = [watchers.next_change(asyncio.get_running_loop()) for _ in range(3)]
    watchers.wake()
    await asyncio.gather(*waiting)
    later = watchers.next_change(asyncio.get_running_loop())
    assert not later.done()
    watchers.wake()
    assert later.done()
    watchers.wake()  # nobody waits


@pytest.mark.parametrize("number", range(3))
async def test_who_was_cancelled_is_passed_over(number: int) -> None:
    watchers = Watchers()

    async def wait() -> None:
        await watchers.next_change(asyncio.get_running_loop())

    there = [asyncio.create_task(wait()) for _ in range(3)]
    gone = there.pop(number)
    await until_blocked(gone, *there)
    gone.cancel()
    await asyncio.wait({gone})
    watchers.wake()
    await asyncio.gather(*there)


async def test_who_was_cancelled_is_not_remembered() -> None:
    watchers, loop = Watchers(), asyncio.get_running_loop()
    for _ in range(3):
        watchers.next_change(loop).cancel()
    assert len(watchers) == 0 and watchers._others is None
    watchers.next_change(loop)
    watchers.next_change(loop)
    assert len(watchers) == 2
