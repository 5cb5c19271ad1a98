"""A process that runs some code beside a test, and talks with it line by line."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator
from typing import Protocol

__all__ = ("Talks", "ask", "line_of", "running", "tell")


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
