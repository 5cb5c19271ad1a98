"""The serving process that a bench without a URL starts for itself.

A lookup buffer, and the baselines' raw sockets. It prints its URL, and ends when its
standard input does: it never outlives the bench.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Sequence
from typing import Final

from asynckv.buffers.lookup import LookupBuffer
from asynckv.buffers.serve import serve
from asynckv.buffers.store import StoreBuffer
from asynckv.cli.bench.baselines import (
    MEETING_KEY,
    TOKEN_NBYTES,
    Meeting,
    RawServer,
    StreamsServer,
    meeting_as_tensor,
)
from asynckv.cli.bench.echo import EchoServer
from asynckv.cli.bench.settings import Settings
from asynckv.cli.process import LoopName, run
from asynckv.links.address import LOOPBACK, parse_url
from asynckv.links.options import Digest

__all__ = (
    "ServerEnded",
    "main",
    "own_child",
    "own_server",
    "serving",
    "until_hung_up",
)


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


_MAX_BYTES: Final = "3GiB"
# Large entries are given back and selected again, instead of being sent anew.
_MAX_DELIVER: Final = 10**9


@contextlib.asynccontextmanager
async def serving(url: str, settings: Settings) -> AsyncIterator[str]:
    """Serve a bench at ``url`` while the body runs; yield the URL with the port.

    The raw sockets listen on ports of their own at the same host, without TLS.

    :raises ConfigError: as :func:`asynckv.serve` does
    """
    host = parse_url(url).host or LOOPBACK
    token = secrets.token_bytes(TOKEN_NBYTES)
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
        raw = RawServer(host, token)
        stack.callback(raw.close)
        streams_port = await stack.enter_async_context(StreamsServer(host, token))
        echo_port = await stack.enter_async_context(EchoServer(host, token))
        meeting = Meeting(raw.port, streams_port, echo_port, token)
        await store.put(MEETING_KEY, meeting_as_tensor(meeting))
        yield server.url


@contextlib.asynccontextmanager
async def own_server(settings: Settings) -> AsyncIterator[str]:
    """Start a serving process on loopback and yield its URL; end it at the end.

    Of the settings only those that mean something on loopback are passed on.

    :raises asynckv.cli.bench.server.ServerEnded: it could not serve
    """
    lanes = str(settings.lanes or "")
    arguments = ("-m", "asynckv.cli.bench.server", settings.digest, lanes)
    async with own_child(*arguments, settings.loop) as url:
        yield url


async def _serve(settings: Settings) -> None:
    async with serving("tcp://127.0.0.1:0", settings) as url:
        print(url, flush=True)
        await until_hung_up()


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
