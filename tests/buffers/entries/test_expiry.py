from __future__ import annotations

import asyncio

import pytest

from asynckv.buffers.entries.table import ExpiryClock
from asynckv.testing.blocked import until

pytestmark = pytest.mark.both_loops


async def test_calls_in_order_of_time() -> None:
    called: list[str] = []
    clock = ExpiryClock(called.append, {})
    now = asyncio.get_running_loop().time()
    clock.add(now + 0.02, "later")
    clock.add(now, "now")
    clock.add(now + 0.01, "soon")
    await until(lambda: len(called) == 3)
    assert called == ["now", "soon", "later"]


async def test_stopping_forgets_everything() -> None:
    called: list[str] = []
    clock = ExpiryClock(called.append, {})
    clock.add(asyncio.get_running_loop().time(), "it")
    clock.stop()
    other = ExpiryClock(called.append, {})
    other.add(asyncio.get_running_loop().time(), "other")
    await until(lambda: bool(called))
    assert called == ["other"]


async def test_what_has_left_takes_no_place_for_long() -> None:
    present: dict[str, object] = {"here": 1}
    clock = ExpiryClock(lambda entry_id: None, present)
    for number in range(3000):
        clock.add(asyncio.get_running_loop().time() + 600, f"gone {number}")
    assert len(clock._due) < 1100
    clock.stop()


async def test_a_call_may_add_another() -> None:
    called: list[str] = []

    def again(entry_id: str) -> None:
        called.append(entry_id)
        if len(called) < 3:
            clock.add(asyncio.get_running_loop().time(), entry_id)

    clock = ExpiryClock(again, {})
    clock.add(asyncio.get_running_loop().time(), "it")
    await until(lambda: len(called) == 3)
