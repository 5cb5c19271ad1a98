"""Tasks of a test: waiting until they wait, entering in one what another one leaves.

pytest-asyncio fixtures, FastAPI dependencies and lifespans do not promise to run
both ends of an ``async with`` in one task. Whoever holds a task group or a cancel
scope across its ``yield`` breaks there.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Final, TypeVar

__all__ = ("cancel_before_each", "until", "until_blocked", "use_across_tasks")

_T = TypeVar("_T")
_R = TypeVar("_R")

_TIMEOUT_S: Final = 10.0
_QUIET_TICKS: Final = 5
_BUSY_TURNS: Final = 100
_PAUSE_S: Final = 0.0005


async def until(
    predicate: Callable[[], bool], *, timeout_s: float = _TIMEOUT_S
) -> None:
    """Yield to the event loop until ``predicate()`` is true.

    :raises TimeoutError: it did not become true within ``timeout_s``
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    for turn in itertools.count():
        if predicate():
            return
        if loop.time() > deadline:
            raise TimeoutError(
                f"still not so after {timeout_s:g} s: {_place(predicate)}"
            )
        # What takes long is done by other threads or processes: leave them the core.
        await asyncio.sleep(0 if turn < _BUSY_TURNS else _PAUSE_S)


async def until_blocked(*tasks: asyncio.Task[Any]) -> None:
    """Yield to the event loop until each task is done, or stays where it waits.

    :raises TimeoutError: they go on and on
    """
    quiet = 0

    def are_blocked() -> bool:
        nonlocal quiet
        quiet = quiet + 1 if all(map(_is_blocked, tasks)) else 0
        return quiet >= _QUIET_TICKS

    await until(are_blocked)


async def cancel_before_each(
    waiting: asyncio.Task[None], awaited: Sequence[asyncio.Future[None]]
) -> None:
    """Cancel ``waiting`` before each of what it waits for ends, and see it out.

    :raises AssertionError: it did not wait for all of them
    """
    ended_early = False
    for one in awaited:
        await until_blocked(waiting)
        ended_early |= waiting.done()
        waiting.cancel()
        one.set_result(None)
    await asyncio.wait({waiting})
    if ended_early:
        raise AssertionError("it has not waited for all")


async def use_across_tasks(
    manager: AbstractAsyncContextManager[_T, Any],
    use: Callable[[_T], Awaitable[object]] | None = None,
    *,
    step_timeout_s: float = _TIMEOUT_S,
) -> None:
    """Enter ``manager`` in one task, use it in a second and leave it in a third.

    Each task has ended before the next begins. Whatever a step raises is raised
    here; ``manager`` is left also if ``use`` raises.

    :raises TimeoutError: a step took longer than ``step_timeout_s``
    """

    async def using(entered: _T) -> None:
        if use is not None:
            await use(entered)

    entered = await _in_a_task(manager.__aenter__(), step_timeout_s)
    try:
        await _in_a_task(using(entered), step_timeout_s)
    finally:
        await _in_a_task(manager.__aexit__(None, None, None), step_timeout_s)


def _place(predicate: Callable[[], bool]) -> str:
    code = getattr(predicate, "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code else repr(predicate)


def _is_blocked(task: asyncio.Task[Any]) -> bool:
    waited_for: asyncio.Future[Any] | None = getattr(task, "_fut_waiter", None)
    return task.done() or (waited_for is not None and not waited_for.done())


async def _in_a_task(step: Awaitable[_R], timeout_s: float) -> _R:
    async def run() -> _R:
        return await step

    return await asyncio.wait_for(asyncio.create_task(run()), timeout_s)
