from __future__ import annotations

import asyncio
import threading

import anyio
import pytest

from asynckv.links.sockets import in_thread
from asynckv.testing.blocked import until_blocked

pytestmark = pytest.mark.both_loops


async def test_work_is_done_in_another_thread() -> None:
    assert await in_thread(threading.current_thread) is not threading.current_thread()


async def test_what_it_raises_is_raised() -> None:
    def work() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        await in_thread(work)


async def test_an_error_that_comes_after_a_cancellation_is_dropped() -> None:
    may_end = threading.Event()

    def work() -> None:
        may_end.wait()
        raise ValueError("too late")

    task = asyncio.create_task(in_thread(work))
    await until_blocked(task)
    task.cancel()
    await asyncio.sleep(0)
    may_end.set()
    await asyncio.wait({task})
    assert task.cancelled()


@pytest.mark.parametrize("by_scope", [False, True])
async def test_a_cancellation_is_delivered_once_the_work_is_done(
    by_scope: bool,
) -> None:
    may_end, done = threading.Event(), []
    scope = anyio.CancelScope()

    def work() -> None:
        may_end.wait()
        done.append(True)

    async def run() -> None:
        with scope:
            await in_thread(work)

    task = asyncio.create_task(run())
    await until_blocked(task)
    scope.cancel() if by_scope else task.cancel()
    for _ in range(5):
        await asyncio.sleep(0)
    assert not task.done()
    may_end.set()
    await asyncio.wait({task})
    assert done == [True]
    assert task.cancelled() != by_scope
