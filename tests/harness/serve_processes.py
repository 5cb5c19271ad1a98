"""``asynckv serve`` in a process of its own, beside a test."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import urllib.parse
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Final

from harness.forks import Fork, ForkServer

__all__ = ("ServeProcess", "http_get", "serving")

_HTTP: Final = "health and metrics are at "
_TESTS: Final = Path(__file__).parent.parent
_RUN: Final = """
import os, runpy, sys
sys.path[:0] = os.environ["PYTHONPATH"].split(os.pathsep)
runpy.run_module("asynckv", run_name="__main__", alter_sys=True)
"""


class ServeProcess:
    """``url`` is where it serves; ``log`` has the lines of its log so far."""

    def __init__(self, process: asyncio.subprocess.Process | Fork) -> None:
        self.process = process
        self.log: list[str] = []
        self.url = ""

    async def until_logged(self, words: str) -> str:
        """Wait for the next line of its log with ``words`` in it.

        :raises EOFError: it has ended without one
        """
        if self.process.stderr is None:
            raise ValueError("its log goes elsewhere")
        while line := (await self.process.stderr.readline()).decode().rstrip("\n"):
            self.log.append(line)
            if words in line:
                return line
        raise EOFError("\n".join(self.log))

    async def http_url(self) -> str:
        """Wait until it says where it answers over HTTP."""
        return (await self.until_logged(_HTTP)).partition(_HTTP)[2]

    async def until_serving(self) -> str:
        """Wait until it serves; return where, with what it has printed.

        :raises EOFError: it has ended without
        """
        self.url = await self.line()
        if not self.url:
            await self.until_logged("no such line")
        return self.url

    async def line(self) -> str:
        """Wait for what it prints next; an empty line if it has ended."""
        if self.process.stdout is None:
            raise ValueError("what it prints goes elsewhere")
        return (await self.process.stdout.readline()).decode().strip()

    def signal(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Send it a signal."""
        self.process.send_signal(number)

    async def ended(self) -> int:
        """Wait for its end; return its status. All of its log is read then."""
        with contextlib.suppress(EOFError):
            await self.until_logged("no such line")
        return await self.process.wait()


@contextlib.asynccontextmanager
async def serving(
    *options: str,
    forks: ForkServer | None = None,
    environ: Mapping[str, str] | None = None,
    path: Path | None = None,
    redirect: str = "",
    runner: str = "",
) -> AsyncIterator[ServeProcess]:
    """Run ``asynckv serve`` at a free port; leaving kills it, if it still runs.

    It is one of ``forks``; without them it is started as people start it, by a shell
    that does ``redirect``, and by ``runner`` if that is given. Modules are looked for
    in ``path``, too. Of this process's variables it gets none of asynckv.
    """
    given, pipe = _environ(environ or {}, path), subprocess.PIPE
    if forks is not None:
        forked = forks.running(_RUN, "serve", *options, stderr=pipe, environ=given)
        async with forked as fork:
            yield ServeProcess(fork)
        return
    command = ("sh", "-c", f'exec {runner} "$0" "$@" {redirect}', sys.executable)
    arguments = ("-m", "asynckv", "serve", *options)
    process = await asyncio.create_subprocess_exec(
        *(*command, *arguments),
        stdout=pipe,
        stderr=pipe,
        env=given,
        preexec_fn=_hear_signals,
    )
    try:
        yield ServeProcess(process)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.communicate()


def _hear_signals() -> None:
    """Ignore none, as tests that run in the background of a shell do."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def _environ(more: Mapping[str, str], path: Path | None) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith("ASYNCKV_")}
    places = [str(path)] if path is not None else []
    places += [str(_TESTS), *filter(None, [kept.get("PYTHONPATH")])]
    listen = {"ASYNCKV_LISTEN": "tcp://127.0.0.1:0"}
    return {**kept, **listen, "PYTHONPATH": os.pathsep.join(places), **more}


async def http_get(url: str) -> tuple[int, str]:
    """Get a page; return its status and its body."""
    parts = urllib.parse.urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    try:
        writer.write(f"GET {parts.path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        answer = (await reader.read()).decode()
    finally:
        writer.close()
        await writer.wait_closed()
    head, _, body = answer.partition("\r\n\r\n")
    return int(head.split(" ", 2)[1]), body
