from __future__ import annotations

import asyncio

from asynckv.buffers.entries.admission import Changes
from asynckv.testing.cancellation import CancelMode, Outcome, sweep_cancellation


async def test_what_is_true_already_is_not_waited_for() -> None:
    changes = Changes()
    coroutine = changes.until(lambda: True)
    try:
        coroutine.send(None)
    except StopIteration:
        return
    raise AssertionError("it suspended")


async def test_everybody_looks_again_after_a_change() -> None:
    changes, state = Changes(), [0]
    waiters = [
        asyncio.create_task(changes.until(lambda n=n: state[0] >= n))  # type: ignore[misc]
        for n in (1, 2)
    ]
    for n, waiter in enumerate(waiters, start=1):
        await asyncio.sleep(0)
        state[0] = n
        changes.notify_soon()
        await waiter
    await changes.aclose()


async def test_nobody_is_notified_when_nobody_waits() -> None:
    changes = Changes()
    changes.notify_soon()
    assert len(asyncio.all_tasks()) == 1
    await changes.aclose()


async def test_a_cancelled_wait_takes_no_wakeup_from_another() -> None:
    changes, state = Changes(), [False]
    others: list[asyncio.Task[None]] = []

    async def before() -> None:
        state[0] = False
        others.append(asyncio.create_task(changes.until(lambda: state[0])))
        asyncio.get_running_loop().call_soon(let)

    def let() -> None:
        state[0] = True
        changes.notify_soon()

    async def check(k: int, mode: CancelMode, outcome: Outcome[None]) -> None:
        await others.pop()

    await sweep_cancellation(
        lambda: changes.until(lambda: state[0]), check, before=before
    )
    await changes.aclose()
