from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import weakref
from collections.abc import Generator

import anyio
import pytest

from asynckv.waits.waiting import clear_all_frames, wait_or_stop, wait_shielded


async def _ticks(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_a_shielded_wait_outlasts_repeated_cancellation() -> None:
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(wait_shielded(future))
    for _ in range(3):
        await _ticks(2)
        task.cancel()
    await _ticks(3)
    assert not task.done()
    future.set_result(None)
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_cancelled_wait_holds_nothing_once_its_task_is_gone() -> None:
    class Memory:
        """What a caller has in its frame."""

    async def call() -> None:
        memory = Memory()
        held.append(weakref.ref(memory))
        await wait_shielded(future)

    held: list[weakref.ref[Memory]] = []
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(call())
    await _ticks(2)
    task.cancel()
    future.set_result(None)
    await asyncio.wait({task})
    gc.disable()
    del task
    await _ticks(2)
    gc.enable()
    assert held[0]() is None


async def test_a_shielded_wait_outlasts_a_cancelled_scope() -> None:
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_later(0.01, future.set_result, None)
    with anyio.CancelScope() as scope:
        scope.cancel()
        await wait_shielded(future)
        assert future.done()
        await asyncio.sleep(0)
    assert scope.cancelled_caught


async def test_a_shielded_wait_can_be_bounded() -> None:
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    await wait_shielded(future, timeout_s=0.01)
    assert not future.done()


async def test_cancellation_stops_first_and_waits_for_the_stop() -> None:
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    order: list[str] = []

    def stop() -> None:
        order.append("stop")
        future.get_loop().call_later(0.01, future.set_result, None)

    future.add_done_callback(lambda _: order.append("quiet"))
    with anyio.CancelScope() as scope:
        scope.cancel()
        try:
            await wait_or_stop(future, stop)
        finally:
            order.append("delivered")
    assert order == ["stop", "quiet", "delivered"]


async def test_a_wait_that_is_not_cancelled_stops_nothing() -> None:
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    future.set_result(None)
    await wait_or_stop(future, lambda: pytest.fail("stopped"))


async def test_closing_the_coroutine_stops() -> None:
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    stopped: list[bool] = []
    waiting = wait_or_stop(future, lambda: stopped.append(True))
    waiting.send(None)
    waiting.close()
    assert stopped == [True]


def test_the_first_shielded_wait_imports_nothing() -> None:
    program = """
import asyncio, sys
from asynckv.waits.waiting import wait_shielded

async def main():
    future = asyncio.get_running_loop().create_future()
    future.set_result(None)
    before = set(sys.modules)
    await wait_shielded(future)
    return set(sys.modules) - before

print(asyncio.run(main()))
"""
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True
    )
    assert ran.stdout.strip() == "set()", ran.stdout + ran.stderr


def test_no_frame_of_an_error_or_of_what_came_before_it_keeps_anything() -> None:
    class Memory:
        pass

    def fail(error: Exception) -> None:
        memory = Memory()
        kept.append(weakref.ref(memory))
        raise error

    def fail_again(error: Exception) -> None:
        memory = Memory()
        kept.append(weakref.ref(memory))
        try:
            fail(error)
        finally:
            fail(ValueError("again"))

    kept: list[weakref.ref[Memory]] = []
    with pytest.raises(ValueError, match="again") as found:
        fail_again(KeyError("first"))
    error = found.value
    assert len(kept) == 3 and all(ref() is not None for ref in kept)
    error.__cause__ = error  # a ring of them ends too
    clear_all_frames(error)
    assert not any(ref() is not None for ref in kept)


async def test_a_task_that_has_caught_an_error_and_goes_on_keeps_its_frames() -> None:
    gate: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    error = KeyError("shared")

    async def catch_and_go_on() -> str:
        try:
            raise error
        except KeyError:
            await wait_shielded(gate)
        return "went on"

    task = asyncio.create_task(catch_and_go_on())
    await _ticks(2)
    again = ValueError("from it")
    again.__cause__ = error
    for one in (error, again):
        clear_all_frames(one)
    gate.set_result(None)
    assert await asyncio.wait_for(task, 10) == "went on"


async def test_frames_of_coroutines_and_generators_that_are_over_keep_nothing() -> None:
    class Memory:
        pass

    def generate() -> Generator[None, None, None]:
        memory = Memory()
        kept.append(weakref.ref(memory))
        yield

    async def fail() -> None:
        memory = Memory()
        kept.append(weakref.ref(memory))
        for _ in (generator := generate()):
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError as exc:
                generator.throw(exc)

    kept: list[weakref.ref[Memory]] = []
    task = asyncio.create_task(fail())
    await _ticks(2)
    task.cancel()
    with pytest.raises(asyncio.CancelledError) as found:
        await task
    assert len(kept) == 2 and all(ref() is not None for ref in kept)
    clear_all_frames(found.value)
    assert not any(ref() is not None for ref in kept)


def test_frames_of_the_members_of_a_group_keep_nothing() -> None:
    class Memory:
        pass

    def fail() -> None:
        memory = Memory()
        kept.append(weakref.ref(memory))
        raise KeyError("one of them")

    kept: list[weakref.ref[Memory]] = []
    with pytest.raises(KeyError) as found:
        fail()
    assert kept[0]() is not None
    clear_all_frames(ExceptionGroup("some", [found.value]))
    assert kept[0]() is None


def test_an_error_that_is_the_cause_of_its_cause_is_looked_at_once() -> None:
    first, second = ValueError("first"), ValueError("second")
    first.__cause__, second.__context__ = second, first
    clear_all_frames(first)
