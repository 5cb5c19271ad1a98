"""The serving side of a bench, and the process that one without a URL starts for it.

A lookup buffer, and the baselines. That process prints its URL, and ends when its
standard input does: it never outlives the bench.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Final

import msgspec

from asynckv.buffers.lookup import LookupBuffer
from asynckv.buffers.serve import serve
from asynckv.buffers.store import StoreBuffer
from asynckv.cli.bench.baselines import (
    MEETING_KEY,
    BaselineServer,
    meeting_as_tensor,
)
from asynckv.cli.bench.report import DigestName, Settings
from asynckv.cli.process import LoopName, run
from asynckv.links.address import LOOPBACK, parse_url

__all__ = (
    "ServerEnded",
    "main",
    "own_child",
    "own_server",
    "serving",
    "until_hung_up",
)

_STOP_GRACE_S = 5.0
_MAX_BYTES: Final = "3GiB"
# Large entries are given back and selected again, instead of being sent anew.
_MAX_DELIVER: Final = 10**9


@contextlib.asynccontextmanager
async def serving(url: str, settings: Settings) -> AsyncIterator[str]:
    """Serve a bench at ``url`` while the body runs; yield the URL with the port.

    The baselines have a port of their own at the same host, without TLS.

    :raises ConfigError: as :func:`asynckv.serve` does
    """
    async with contextlib.AsyncExitStack() as stack:
        lookup = LookupBuffer(_MAX_BYTES, max_deliver=_MAX_DELIVER, drain_s=0)
        stack.callback(lookup.abort)
        store = StoreBuffer(2**20)
        stack.callback(store.abort)
        server = await stack.enter_async_context(
            serve(
                url,
                lookup=lookup,
                store=store,
                digest=settings.digest,
                lanes=settings.lanes,
                secret_file=settings.secret_file,
                tls=settings.tls,
                allow_plaintext=settings.allow_plaintext,
            )
        )
        baselines = BaselineServer(parse_url(url).host or LOOPBACK)
        meeting = await stack.enter_async_context(baselines)
        await store.put(MEETING_KEY, meeting_as_tensor(meeting))
        yield server.url


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
        line = await process.stdout.readline() if process.stdout is not None else b""
        if not line:
            raise ServerEnded(f"the server ended with status {await process.wait()}")
        yield line.decode().strip()
    finally:
        await asyncio.shield(_stop(process))


async def _stop(process: Process) -> None:
    if process.stdin is not None:
        process.stdin.close()
    try:
        async with asyncio.timeout(_STOP_GRACE_S):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()


async def until_hung_up() -> None:
    """Wait, in such a process, until whoever started it closes its standard input."""
    loop, over = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(0, over.set)  # nothing is ever written to it
    try:
        await over.wait()
    finally:
        loop.remove_reader(0)


def own_server(settings: Settings) -> AbstractAsyncContextManager[str]:
    """Start a serving process on loopback and yield its URL; end it at the end.

    Of the settings only those that mean something on loopback are passed on.

    :raises asynckv.cli.bench.server.ServerEnded: it could not serve
    """
    passed = (settings.digest, str(settings.lanes or ""), settings.loop)
    return own_child("-m", "asynckv.cli.bench.server", *passed)


async def _serve(settings: Settings) -> None:
    async with serving("tcp://127.0.0.1:0", settings) as url:
        print(url, flush=True)
        await until_hung_up()


def main(arguments: Sequence[str]) -> None:
    """Serve with digest, lanes and loop of ``arguments`` until stdin ends."""
    digest, lanes, loop = arguments
    settings = Settings(
        digest=msgspec.convert(digest, DigestName),
        lanes=int(lanes) if lanes else None,
        loop=msgspec.convert(loop, LoopName),
    )
    run(_serve(settings), settings.loop)


if __name__ == "__main__":
    main(sys.argv[1:])
