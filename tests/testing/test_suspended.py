from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from asynckv.buffers.lookup import LookupBuffer
from asynckv.testing.blocked import until_blocked
from asynckv.testing.suspended import frames_of, trail, where


async def wait_for_ever() -> None:
    await asyncio.get_running_loop().create_future()


async def count() -> AsyncIterator[int]:
    await wait_for_ever()
    yield 1


async def iterate() -> None:
    async for _ in count():
        pass


@asynccontextmanager
async def opened() -> AsyncIterator[None]:
    await wait_for_ever()
    yield


async def enter() -> None:
    async with opened():
        pass


async def select() -> None:
    async with LookupBuffer(100, drain_s=0) as buffer:
        await buffer.drop_select([1])


async def names_in(coroutine_function: object) -> list[str]:
    coroutine = coroutine_function()  # type: ignore[operator]
    task = asyncio.create_task(coroutine)
    await until_blocked(task)
    names = [frame.f_code.co_qualname for frame in frames_of(coroutine)]
    task.cancel()
    await asyncio.wait({task})
    return names


async def test_it_looks_through_generators_and_context_managers() -> None:
    assert await names_in(iterate) == ["iterate", "count", "wait_for_ever"]
    found = await names_in(enter)
    assert found[2:] == ["opened", "wait_for_ever"]


async def test_it_looks_through_an_awaited_object() -> None:
    assert "LocalConsumer.take" in await names_in(select)


async def test_it_names_the_innermost_place() -> None:
    coroutine = wait_for_ever()
    task = asyncio.create_task(coroutine)
    await until_blocked(task)
    assert where(coroutine).startswith("wait_for_ever (line ")
    assert [line.rpartition(" in ")[2] for line in trail(coroutine)] == [
        "wait_for_ever"
    ]
    task.cancel()
    await asyncio.wait({task})
    assert where(coroutine) == where(object()) == "?"
