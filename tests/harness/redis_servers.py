"""Real Redis servers for one test each, started where a test wants them."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Final

from asynckv.security.tls import TLS

__all__ = (
    "CLI",
    "PROGRAM",
    "RedisProcess",
    "free_port",
    "running_cluster",
    "running_redis",
    "tls_options",
)

PROGRAM: Final = "redis-server"
CLI: Final = "redis-cli"
_READY: Final = b"Ready to accept connections"
_HOST: Final = "127.0.0.1"


def free_port() -> int:
    """Return a port that nobody listens on now."""
    with socket.socket() as sock:
        sock.bind((_HOST, 0))
        return int(sock.getsockname()[1])


def tls_options(tls: TLS) -> list[str]:
    """Return the options of a server that speaks TLS alone, with this certificate."""
    return [
        *("--tls-auth-clients", "no"),
        *("--tls-cert-file", str(tls.certificate), "--tls-key-file", str(tls.key)),
        *("--tls-ca-cert-file", str(tls.ca)),
    ]


class RedisProcess:
    """One server on ``port``, and on a socket in ``folder``; it forgets all it has."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.port = free_port()
        self.folder = folder
        self.options: Sequence[str] = options
        self.path = folder / f"{self.port}.sock"
        self._process: asyncio.subprocess.Process | None = None

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"redis://{_HOST}:{self.port}"

    @property
    def unix_url(self) -> str:
        """Where it listens, too."""
        return f"redis+unix://{self.path}"

    async def start(self) -> None:
        """Start it, and wait until it answers. Again, when it has ended."""
        self._process = process = await asyncio.create_subprocess_exec(
            *(PROGRAM, *self._ports(), "--bind", _HOST),
            *("--unixsocket", str(self.path), "--dir", str(self.folder)),
            *("--save", "", "--appendonly", "no", *self.options),
            stdout=asyncio.subprocess.PIPE,
        )
        if process.stdout is None:
            raise ValueError("what it prints goes elsewhere")
        said = b""
        while _READY not in said:
            line = await process.stdout.readline()
            if not line:
                raise RuntimeError(f"{PROGRAM} has ended: {said.decode()}")
            said += line

    def freeze(self) -> None:
        """Stop it where it is, until it is thawed."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Let it go on."""
        self._signal(signal.SIGCONT)

    async def kill(self) -> None:
        """End it now. Again is nothing."""
        process = self._process
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.communicate()

    def _ports(self) -> tuple[str, ...]:
        if "--tls-cert-file" in self.options:
            return ("--port", "0", "--tls-port", str(self.port))
        return ("--port", str(self.port))

    def _signal(self, number: int) -> None:
        if self._process is not None:
            self._process.send_signal(number)


@contextlib.asynccontextmanager
async def running_redis(folder: Path, *options: str) -> AsyncIterator[RedisProcess]:
    """Run a server, with nothing in it; leaving kills it, if it still runs."""
    server = RedisProcess(folder, *options)
    try:
        await server.start()
        yield server
    finally:
        await server.kill()


@contextlib.asynccontextmanager
async def running_cluster(folder: Path) -> AsyncIterator[list[RedisProcess]]:
    """Run six servers as one cluster, of which each key has a copy."""
    async with contextlib.AsyncExitStack() as stack:
        nodes = []
        for number in range(6):
            options = (
                *("--cluster-config-file", f"nodes-{number}.conf"),
                *("--cluster-enabled", "yes", "--cluster-port", str(free_port())),
                *("--cluster-node-timeout", "1500", "--repl-diskless-sync-delay", "0"),
                # Else all of it is down until the master is replaced.
                *("--cluster-require-full-coverage", "no"),
            )
            running = running_redis(folder, *options)
            nodes.append(await stack.enter_async_context(running))
        where = [f"{_HOST}:{node.port}" for node in nodes]
        await _ask("--cluster", "create", *where, "--cluster-replicas", "1")
        async with asyncio.timeout(20):
            for node in nodes:  # each knows of all the others
                while b"cluster_state:ok" not in await _ask(
                    "-p", str(node.port), "cluster", "info"
                ):
                    pass  # it is asked again
        yield nodes


async def _ask(*arguments: str) -> bytes:
    process = await asyncio.create_subprocess_exec(
        CLI, "--cluster-yes", *arguments, stdout=asyncio.subprocess.PIPE
    )
    said, _ = await process.communicate()
    if process.returncode:
        raise RuntimeError(f"{arguments} has failed: {said.decode()}")
    return said
