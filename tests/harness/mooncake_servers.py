"""A real Mooncake Store for one test: a master, and a process that gives memory."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib.util
import os
import signal
import subprocess
import sys
from asyncio.subprocess import DEVNULL, PIPE, STDOUT, Process
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

from harness.redis_servers import free_port

__all__ = ("MooncakeServers", "running_mooncake", "why_no_mooncake")

_HOST: Final = "127.0.0.1"
_READY: Final = b"Starting real client service"
_PAUSE_S: Final = 0.02


@functools.cache
def why_no_mooncake() -> str:
    """Say why no test can have one; nothing, if they can."""
    if importlib.util.find_spec("mooncake") is None:
        return "mooncake-transfer-engine-non-cuda is not installed: nox -s stores"
    # In a process of its own: it brings threads, and may not end well.
    tried = subprocess.run(
        [sys.executable, "-c", "import mooncake.store"],
        check=False,
        capture_output=True,
        text=True,
    )
    error = (tried.stderr.strip() or "?").splitlines()[-1]
    return f"Mooncake cannot be used here: {error}" if tried.returncode else ""


class MooncakeServers:
    """A master on ``port``, and an ``owner`` of so much memory. Both forget all."""

    def __init__(self, memory: str) -> None:
        self.port = free_port()
        self.memory = memory
        self.master: Process | None = None
        self.owner: Process | None = None

    @property
    def url(self) -> str:
        """Of a tier there."""
        return f"mooncake://{_HOST}:{self.port}"

    async def start_master(self) -> None:
        """Start it, and wait until it can be reached. Again, when it was killed."""
        self.master = await _run(
            *("mooncake_master", f"--rpc_port={self.port}", f"--rpc_address={_HOST}"),
            *(f"--metrics_port={free_port()}", f"--metrics_host={_HOST}"),
            says=DEVNULL,
        )
        while self._is_running():
            try:
                _, writer = await asyncio.open_connection(_HOST, self.port)
            except ConnectionRefusedError:
                await asyncio.sleep(_PAUSE_S)
            else:
                writer.close()
                return

    async def start_owner(self) -> None:
        """Start it, and wait until the master knows of its memory."""
        self.owner = owner = await _run(
            *("mooncake_client", f"--host={_HOST}", f"--port={free_port()}"),
            *(f"--global_segment_size={self.memory}", "--metadata_server=P2PHANDSHAKE"),
            f"--master_server_address={_HOST}:{self.port}",
            says=PIPE,
        )
        if owner.stdout is None:
            raise ValueError("what it prints goes elsewhere")
        said = b""
        while _READY not in said:
            line = await owner.stdout.readline()
            if not line:
                raise RuntimeError(f"mooncake_client has ended: {said.decode()}")
            said += line

    async def freeze(self) -> None:
        """Stop the master where it is, all of its threads, until it is thawed."""
        await _freeze(self.master)

    def thaw(self) -> None:
        """Let it go on."""
        if self.master is not None:
            self.master.send_signal(signal.SIGCONT)

    async def freeze_owner(self) -> None:
        """Stop who has the memory, for good."""
        await _freeze(self.owner)

    async def kill_master(self) -> None:
        """End it now. Again is nothing."""
        await _kill(self.master)

    async def kill_owner(self) -> None:
        """End it now. Again is nothing."""
        await _kill(self.owner)

    def _is_running(self) -> bool:
        if self.master is None or self.master.returncode is not None:
            raise RuntimeError("mooncake_master has ended")
        return True


@contextlib.asynccontextmanager
async def running_mooncake(memory: str = "256MB") -> AsyncIterator[MooncakeServers]:
    """Run a Mooncake Store with nothing in it; leaving kills it."""
    servers = MooncakeServers(memory)
    try:
        await servers.start_master()
        await servers.start_owner()
        yield servers
    finally:
        await servers.kill_owner()
        await servers.kill_master()


async def _run(program: str, *options: str, says: int) -> Process:
    path = Path(sys.executable).with_name(program)
    return await asyncio.create_subprocess_exec(
        *(str(path), *options), stdin=DEVNULL, stdout=says, stderr=STDOUT
    )


async def _freeze(process: Process | None) -> None:
    if process is not None:
        process.send_signal(signal.SIGSTOP)
        # Some of its threads go on until one of them has had its turn.
        what = os.WSTOPPED | os.WNOWAIT
        await asyncio.to_thread(os.waitid, os.P_PID, process.pid, what)


async def _kill(process: Process | None) -> None:
    if process is not None:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.communicate()
