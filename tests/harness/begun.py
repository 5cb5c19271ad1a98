"""Work begun in a task, and cancelled in either way."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import anyio
import pytest

__all__ = ("Begin", "Cancel", "begin")

Cancel = Callable[[], Coroutine[Any, Any, None]]
Begin = Callable[[Coroutine[Any, Any, None]], tuple[asyncio.Task[None], Cancel]]


@pytest.fixture(params=["task", "scope"])
def begin(request: pytest.FixtureRequest) -> Begin:
    """Begin work in a task; return that, and what cancels it and waits for its end.

    It is cancelled itself, or the scope that the work is done in.
    """

    def begin(work: Coroutine[Any, Any, None]) -> tuple[asyncio.Task[None], Cancel]:
        async def run() -> None:
            with scope:
                await work

        async def cancel_task() -> None:
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

        async def cancel_scope() -> None:
            scope.cancel()
            await task
            assert scope.cancelled_caught

        scope, task = anyio.CancelScope(), asyncio.create_task(run())
        return task, cancel_task if request.param == "task" else cancel_scope

    return begin
