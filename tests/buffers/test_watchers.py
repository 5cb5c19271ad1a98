from __future__ import annotations

import asyncio

from asynckv.buffers.watchers import Watchers
from asynckv.testing.blocked import until_blocked


async def test_all_who_wait_are_woken_once() -> None:
    watchers = Watchers()
    waiting = [watchers.next_change() for _ in range(3)]
    watchers.wake()
    await asyncio.gather(*waiting)
    later = watchers.next_change()
    assert not later.done()
    watchers.wake()
    assert later.done()
    watchers.wake()  # nobody waits


async def test_who_was_cancelled_is_passed_over() -> None:
    watchers = Watchers()

    async def wait() -> None:
        await watchers.next_change()

    gone, there = asyncio.create_task(wait()), asyncio.create_task(wait())
    await until_blocked(gone)
    gone.cancel()
    await asyncio.wait({gone})
    watchers.wake()
    await there
