"""The serving process that a bench without a URL starts for itself.

It prints its URL, and ends when its standard input does: it never outlives the
bench.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Sequence

from asynckv.cli.bench.serving import serving
from asynckv.cli.bench.settings import Settings
from asynckv.cli.loops import LoopName, run
from asynckv.links.options import Digest

__all__ = ("ServerEnded", "main", "own_server")

_STOP_GRACE_S = 5.0


class ServerEnded(ChildProcessError):
    """The bench's own server process ended before it served."""


@contextlib.asynccontextmanager
async def own_server(settings: Settings) -> AsyncIterator[str]:
    """Start a serving process on loopback and yield its URL; end it at the end.

    Of the settings only those that mean something on loopback are passed on.

    :raises ServerEnded: it could not serve
    """
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "asynckv.cli.bench.server",
        settings.digest,
        str(settings.lanes or ""),
        settings.loop,
        stdin=PIPE,
        stdout=PIPE,
        # Ctrl-C is for the parent, which then hangs up.
        start_new_session=True,
    )
    try:
        yield await _url_of(process)
    finally:
        await asyncio.shield(_stop(process))


async def _url_of(process: Process) -> str:
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


async def _serve(settings: Settings) -> None:
    loop = asyncio.get_running_loop()
    over: asyncio.Future[None] = loop.create_future()

    def read_end() -> None:
        if not os.read(0, 1) and not over.done():
            over.set_result(None)

    async with serving("tcp://127.0.0.1:0", settings) as url:
        print(url, flush=True)
        loop.add_reader(0, read_end)
        try:
            await over
        finally:
            loop.remove_reader(0)


def main(arguments: Sequence[str]) -> None:
    """Serve with digest, lanes and loop of ``arguments`` until stdin ends."""
    digests: dict[str, Digest] = {
        "auto": "auto",
        "full": "full",
        "edges": "edges",
        "off": "off",
    }
    loops: dict[str, LoopName] = {
        "auto": "auto",
        "asyncio": "asyncio",
        "uvloop": "uvloop",
    }
    digest, lanes, loop = arguments
    settings = Settings(digest=digests[digest], lanes=int(lanes) if lanes else None)
    run(_serve(settings), loops[loop])


if __name__ == "__main__":
    main(sys.argv[1:])
