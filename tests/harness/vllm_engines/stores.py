"""A store that engines share, and a Redis behind it: processes of their own."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from asynckv.integrations.bridge import Bridge
from harness.redis_servers import RedisProcess, running_redis
from harness.vllm_engines.commands import get
from harness.vllm_engines.pair import free_url

__all__ = ("RedisBehind", "StoreProcess", "redis_behind", "small_disk", "storing")

_LOST: Final = ("dropped_total", "unwritten_total")
_STORED_S: Final = 60.0
_SERVER_S: Final = 20.0


class StoreProcess:
    """``asynckv serve`` at ``url``, with ``tier`` below its memory.

    ``inside`` is what runs before it, in front of its command.
    """

    def __init__(
        self, url: str, tier: str, *, size: str = "16MiB", inside: tuple[str, ...] = ()
    ) -> None:
        self._scheme = tier.partition(":")[0]
        self._http = free_url().removeprefix("tcp://")
        self._command = [
            *(*inside, sys.executable, "-m", "asynckv", "serve", "--listen", url),
            *("--store", size, "--tier", tier, "--http", self._http),
        ]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, and wait until it serves. Again, when it was killed."""
        self._process = process = subprocess.Popen(
            self._command, stdout=subprocess.PIPE
        )
        assert process.stdout is not None
        assert process.stdout.readline()

    @property
    def pid(self) -> int:
        """Of its process.

        :raises RuntimeError: it does not run
        """
        if self._process is None:
            raise RuntimeError("the store does not run")
        return self._process.pid

    def kill(self) -> None:
        """As a crash would. Again is nothing."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()

    def freeze(self) -> None:
        """Stop it where it is, until it is thawed."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Let it go on."""
        self._signal(signal.SIGCONT)

    def wait_for(self, blocks: int) -> int:
        """Wait until its tier has taken so many, or not: return how many it has.

        A tier that is slow is not waited for: what it had no room for is not there.
        """
        names = ("accepted_total", *_LOST)
        self.wait_until(lambda: sum(map(self.count, names)) >= blocks)
        return blocks - int(sum(map(self.count, _LOST)))

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Look at it until it holds."""
        deadline = time.monotonic() + _STORED_S
        while not condition():
            assert time.monotonic() < deadline, "the store is not so far"
            threading.Event().wait(0.05)

    def count(self, name: str) -> float:
        """Return what is counted of the tier."""
        return self._value(f'asynckv_tier_{name}{{tier="{self._scheme}"}}')

    def evictions(self) -> float:
        """Return how many values its memory has dropped for room."""
        return self._value("asynckv_store_evictions_total")

    def _value(self, start: str) -> float:
        page = get(f"http://{self._http}/metrics")
        for line in page.splitlines():
            if line.startswith(f"{start} "):
                return float(line.split()[-1])
        raise LookupError(f"there is no {start} in {page}")

    def _signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)


@contextlib.contextmanager
def storing(
    url: str, tier: str, *, size: str = "16MiB", inside: tuple[str, ...] = ()
) -> Iterator[StoreProcess]:
    """Serve a store; leaving kills it, if it still runs."""
    store = StoreProcess(url, tier, size=size, inside=inside)
    try:
        store.start()
        yield store
    finally:
        store.kill()


def small_disk(folder: Path, size: str = "6m") -> tuple[str, ...]:
    """Return what gives a command a file system of its own at ``folder``: so large."""
    mount = f"mount -t tmpfs -o size={size} tmpfs {folder}"
    shell = ("sh", "-c", f'{mount} && exec "$@"', "sh")
    return ("unshare", "--user", "--map-root-user", "--mount", *shell)


class RedisBehind:
    """A Redis server, for who never awaits."""

    def __init__(self, server: RedisProcess, bridge: Bridge[None]) -> None:
        self._server = server
        self._bridge = bridge
        self.url = server.url
        self.freeze, self.thaw = server.freeze, server.thaw

    def kill(self) -> None:
        """As a crash would: all that it had is gone."""
        self._bridge.run(self._server.kill, timeout_s=_SERVER_S)

    def start(self) -> None:
        """Start it again, when it was killed."""
        self._bridge.run(self._server.start, timeout_s=_SERVER_S)


@contextlib.contextmanager
def redis_behind(folder: Path, *options: str) -> Iterator[RedisBehind]:
    """Run a Redis server; leaving kills it."""
    bridge = Bridge[None]("redis")
    try:
        server = bridge.enter(
            lambda: running_redis(folder, *options), timeout_s=_SERVER_S
        )
        yield RedisBehind(server, bridge)
    finally:
        bridge.shutdown()
