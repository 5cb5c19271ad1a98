"""The other process of a bench: it says where it serves, and never outlives it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator

__all__ = ("ServerEnded", "own_child", "until_hung_up")

_STOP_GRACE_S = 5.0


class ServerEnded(ChildProcessError):
    """The bench's own server process ended before it served."""


@contextlib.asynccontextmanager
async def own_child(*arguments: str) -> AsyncIterator[str]:
    """Start this Python with ``arguments`` and yield the first line it prints.

    Leaving closes its standard input, and kills it 5 s later.

    :raises ServerEnded: it printed none
    """
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *arguments,
        stdin=PIPE,
        stdout=PIPE,
        # Ctrl-C is for the parent, which then hangs up.
        start_new_session=True,
    )
    try:
        yield await _first_line(process)
    finally:
        await asyncio.shield(_stop(process))


async def until_hung_up() -> None:
    """Wait, in such a process, until whoever started it closes its standard input."""
    loop = asyncio.get_running_loop()
    over: asyncio.Future[None] = loop.create_future()

    def read_end() -> None:
        if not os.read(0, 1) and not over.done():
            over.set_result(None)

    loop.add_reader(0, read_end)
    try:
        await over
    finally:
        loop.remove_reader(0)


async def _first_line(process: Process) -> str:
    line = await process.stdout.readline() if process.stdout is not None else b""
    if not line:
        raise ServerEnded(f"the server ended with status {await process.wait()}")
    return line.decode().strip()


async def _stop(process: Process) -> None:
    if process.stdin is not None:
        process.stdin.close()
    try:
        async with asyncio.timeout(_STOP_GRACE_S):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()
