from __future__ import annotations

import asyncio

from asynckv.testing import until, until_blocked
from asynckv.transports.ending import QuietWaits


def _never() -> None:
    raise AssertionError("nobody was to give up")


async def test_what_nobody_touches_is_quiet_at_once() -> None:
    quiet = QuietWaits(asyncio.get_running_loop(), lambda transfer: False)
    await quiet.wait(1, _never)


async def test_each_wait_ends_with_its_own_transfer() -> None:
    touched = {1, 2}
    quiet = QuietWaits(asyncio.get_running_loop(), touched.__contains__)
    waits = [asyncio.create_task(quiet.wait(n, _never)) for n in (1, 2, 1)]
    await until_blocked(*waits)
    touched.discard(1)
    quiet.settle()
    await until(lambda: waits[0].done() and waits[2].done())
    assert not waits[1].done()
    touched.clear()
    quiet.settle()
    await waits[1]


async def test_a_cancellation_is_delivered_when_it_is_quiet() -> None:
    touched = {1}
    quiet = QuietWaits(asyncio.get_running_loop(), touched.__contains__)
    wait = asyncio.create_task(quiet.wait(1, _never))
    await until_blocked(wait)
    wait.cancel()
    await until_blocked(wait)
    assert not wait.done()
    touched.clear()
    quiet.settle()
    await asyncio.wait({wait})
    assert wait.cancelled()


async def test_what_does_not_become_quiet_is_given_up_on_after_a_second() -> None:
    touched = {1}
    quiet = QuietWaits(asyncio.get_running_loop(), touched.__contains__)

    def give_up() -> None:
        touched.clear()
        quiet.settle()

    async with asyncio.timeout(5):
        await quiet.wait(1, give_up)
    assert not touched
