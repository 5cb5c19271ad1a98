from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import pytest

from asynckv.testing.blocked import use_across_tasks

pytestmark = pytest.mark.both_loops


async def test_each_step_runs_in_a_task_of_its_own() -> None:
    tasks: list[asyncio.Task[None] | None] = []

    @asynccontextmanager
    async def manager() -> AsyncIterator[str]:
        tasks.append(asyncio.current_task())
        yield "entered"
        tasks.append(asyncio.current_task())

    async def use(entered: str) -> None:
        assert entered == "entered"
        tasks.append(asyncio.current_task())

    await use_across_tasks(manager(), use)
    assert len({*tasks, asyncio.current_task()}) == 4


async def test_a_cancel_scope_held_across_the_yield_is_found() -> None:
    @asynccontextmanager
    async def manager() -> AsyncIterator[None]:
        with anyio.CancelScope():
            yield

    with pytest.raises(RuntimeError, match="exit cancel scope in a different task"):
        await use_across_tasks(manager())


async def test_it_is_left_after_an_error_too() -> None:
    left: list[bool] = []

    @asynccontextmanager
    async def manager() -> AsyncIterator[None]:
        yield
        left.append(True)

    async def use(entered: None) -> None:
        raise LookupError

    with pytest.raises(LookupError):
        await use_across_tasks(manager(), use)
    assert left == [True]


async def test_a_step_that_hangs_is_reported() -> None:
    @asynccontextmanager
    async def manager() -> AsyncIterator[None]:
        await asyncio.get_running_loop().create_future()
        yield

    with pytest.raises(TimeoutError):
        await use_across_tasks(manager(), step_timeout_s=0.01)
