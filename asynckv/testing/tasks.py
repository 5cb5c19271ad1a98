"""Entering in one task and leaving in another, as fixtures and frameworks do.

pytest-asyncio fixtures, FastAPI dependencies and lifespans do not promise to run
both ends of an ``async with`` in one task. Whoever holds a task group or a cancel
scope across its ``yield`` breaks there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from typing import Any, Final, TypeVar

__all__ = ("use_across_tasks",)

_T = TypeVar("_T")
_R = TypeVar("_R")
_STEP_TIMEOUT_S: Final = 10.0


async def use_across_tasks(
    manager: AbstractAsyncContextManager[_T, Any],
    use: Callable[[_T], Awaitable[object]] | None = None,
    *,
    step_timeout_s: float = _STEP_TIMEOUT_S,
) -> None:
    """Enter ``manager`` in one task, use it in a second and leave it in a third.

    Each task has ended before the next begins. Whatever a step raises is raised
    here; ``manager`` is left also if ``use`` raises.

    :raises TimeoutError: a step took longer than ``step_timeout_s``
    """

    async def using(entered: _T) -> None:
        if use is not None:
            await use(entered)

    async def leave() -> None:
        await manager.__aexit__(None, None, None)

    entered = await _in_a_task(manager.__aenter__(), step_timeout_s)
    try:
        await _in_a_task(using(entered), step_timeout_s)
    finally:
        await _in_a_task(leave(), step_timeout_s)


async def _in_a_task(step: Awaitable[_R], timeout_s: float) -> _R:
    async def run() -> _R:
        return await step

    coroutine: Coroutine[Any, Any, _R] = run()
    return await asyncio.wait_for(asyncio.create_task(coroutine), timeout_s)
