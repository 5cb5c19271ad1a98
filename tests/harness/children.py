"""Tasks and processes beside a test: cancelled, or talked with line by line."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, Protocol

import anyio
import pytest

__all__ = (
    "Begin",
    "Cancel",
    "Talks",
    "ask",
    "begin",
    "line_of",
    "running",
    "tell",
)


class Talks(Protocol):
    """A process whose standard input and output are here."""

    @property
    def stdin(self) -> asyncio.StreamWriter | None:
        """What it reads."""

    @property
    def stdout(self) -> asyncio.StreamReader | None:
        """What it prints."""


@contextlib.asynccontextmanager
async def running(code: str, *args: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run ``code`` in this Python; leaving kills it, if it still runs.

    ``args`` are in its ``sys.argv``, from 1 on.
    """
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", code, *args), stdin=pipe, stdout=pipe
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.communicate()


async def line_of(process: Talks) -> str:
    """Wait for what it prints next; an empty line if it has ended."""
    if process.stdout is None:
        raise ValueError("what it prints goes elsewhere")
    return (await process.stdout.readline()).decode().strip()


async def tell(process: Talks, line: str) -> None:
    """Write a line to its standard input."""
    if process.stdin is None:
        raise ValueError("it reads from elsewhere")
    process.stdin.write(f"{line}\n".encode())
    await process.stdin.drain()


async def ask(process: Talks, line: str) -> str:
    """Write a line to it, and wait for what it prints next."""
    await tell(process, line)
    return await line_of(process)


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
