from __future__ import annotations

import asyncio

import pytest

from asynckv.errors import WrongLoop
from asynckv.loops import LoopBound, ThreadBound

pytestmark = pytest.mark.both_loops


async def check(thing: LoopBound) -> asyncio.AbstractEventLoop:
    return thing._check_loop()


async def test_the_first_use_binds_to_the_running_loop() -> None:
    thing = LoopBound()
    assert await check(thing) is asyncio.get_running_loop()
    assert await check(thing) is asyncio.get_running_loop()


def test_another_loop_is_refused() -> None:
    thing = LoopBound()
    asyncio.run(check(thing))
    with pytest.raises(WrongLoop, match="LoopBound belongs to another event loop"):
        asyncio.run(check(thing))


async def test_another_thread_is_refused() -> None:
    thing = LoopBound()
    thing._check_loop()
    with pytest.raises(WrongLoop, match="no event loop is running"):
        await asyncio.to_thread(thing._check_loop)


def test_without_a_loop_nothing_is_bound() -> None:
    thing = LoopBound()
    with pytest.raises(WrongLoop, match="no event loop is running"):
        thing._check_loop()
    asyncio.run(check(thing))


async def test_two_objects_of_a_class_are_bound_each_for_itself() -> None:
    first, second = LoopBound(), LoopBound()
    first._check_loop()
    assert second._loop is None


async def check_if_bound(thing: LoopBound) -> None:
    thing._check_loop_if_bound()


def test_what_may_come_before_a_loop_binds_nothing() -> None:
    thing = LoopBound()
    thing._check_loop_if_bound()
    asyncio.run(check_if_bound(thing))
    asyncio.run(check(thing))
    with pytest.raises(WrongLoop):
        thing._check_loop_if_bound()
    with pytest.raises(WrongLoop):
        asyncio.run(check_if_bound(thing))


async def test_without_a_loop_things_belong_to_a_thread() -> None:
    thing = ThreadBound()
    await asyncio.to_thread(ThreadBound()._check_thread)
    thing._check_thread()
    thing._check_thread()
    with pytest.raises(WrongLoop, match="ThreadBound belongs to another thread"):
        await asyncio.to_thread(thing._check_thread)
