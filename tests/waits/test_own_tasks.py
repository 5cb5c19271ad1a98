from __future__ import annotations

import asyncio
import weakref

import pytest

from asynckv.testing.blocked import until_blocked
from asynckv.waits.waiting import OwnTasks, PlainTaskGroup, wait_shielded


async def test_what_a_task_fails_of_is_told() -> None:
    failed: list[Exception] = []
    tasks, error = OwnTasks(failed.append), ValueError("no")

    async def fail() -> None:
        raise error

    assert tasks.start(fail, "one that fails").get_name() == "one that fails"
    assert len(tasks) == 1
    await tasks.wait()
    assert failed == [error]
    await asyncio.sleep(0)
    assert not len(tasks)
    await tasks.wait()


async def test_one_that_is_cancelled_has_failed_of_nothing() -> None:
    failed: list[Exception] = []
    tasks = OwnTasks(failed.append)
    for _ in range(2):
        tasks.start(asyncio.Event().wait, "for ever")
    await asyncio.sleep(0)
    tasks.cancel()
    await tasks.wait()
    assert failed == []


async def test_a_cancelled_wait_cancels_none_of_them() -> None:
    tasks, going = OwnTasks(lambda _: None), asyncio.Event()

    async def go() -> None:
        await going.wait()

    task = tasks.start(go, "until it goes")
    waiting = asyncio.create_task(tasks.wait())
    await until_blocked(waiting)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert not task.done()
    going.set()
    await tasks.wait()
    assert task.done() and not task.cancelled()


async def test_an_error_that_is_told_keeps_nothing_of_the_task() -> None:
    failed: list[Exception] = []
    tasks, kept = OwnTasks(failed.append), list[weakref.ref[Held]]()

    async def fail() -> None:
        held = Held()
        kept.append(weakref.ref(held))
        try:
            raise ValueError("before")
        except ValueError as exc:
            raise RuntimeError("after") from exc

    tasks.start(fail, "one that fails")
    await tasks.wait()
    assert str(failed[0]) == "after" and kept[0]() is None


class Held:
    """What a task has in hand."""


async def test_a_cancelled_quiesce_waits_for_all_of_them() -> None:
    tasks, lets_go = (
        OwnTasks(lambda _: None),
        asyncio.get_running_loop().create_future(),
    )
    task = tasks.start(lambda: wait_shielded(lets_go), "one that lets go late")
    await asyncio.sleep(0)
    waiting = asyncio.create_task(tasks.quiesce())
    for _ in range(2):
        await until_blocked(waiting)
        waiting.cancel()
    await until_blocked(waiting)
    assert not task.done()
    lets_go.set_result(None)
    await asyncio.wait({waiting})
    assert waiting.cancelled() and task.cancelled()
    await tasks.quiesce()


async def test_a_task_that_two_own_is_cancelled_by_each() -> None:
    tasks, others = OwnTasks(), OwnTasks()
    task = others.adopt(tasks.own(asyncio.sleep(60), "one of two"))
    others.cancel()
    await tasks.wait()
    assert task.cancelled()
    await asyncio.sleep(0)
    assert not len(tasks) and not len(others)


async def test_what_nobody_is_told_of_is_raised_by_the_task() -> None:
    tasks = OwnTasks()

    async def fail() -> None:
        raise ValueError("no")

    task = tasks.start(fail, "one that fails")
    await tasks.wait()
    assert isinstance(task.exception(), ValueError)


async def test_of_several_tasks_the_first_error_is_raised_as_it_is() -> None:
    ended = asyncio.Event()

    async def fail() -> None:
        raise OSError("the first")

    async def wait() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    with pytest.raises(OSError, match="the first"):
        async with PlainTaskGroup() as group:
            group.create_task(wait())
            group.create_task(fail())
    assert ended.is_set()
