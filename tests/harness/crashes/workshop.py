"""Workers in processes of their own, forked from a clean server, by name."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from typing import Final

import msgspec

from harness.crashes.orders import Order, Report

__all__ = ("Workshop", "open_workshop")

_START_S: Final = 60.0


class Workshop:
    """Starts and kills workers; ``hear`` is called with each report, in order."""

    def __init__(
        self, server: asyncio.subprocess.Process, hear: Callable[[Report], None]
    ) -> None:
        self._server = server
        self._receive = hear
        self._changed = asyncio.Event()
        self._pids: dict[str, int] = {}
        self._steps: dict[int, int] = {}

    async def start(self, order: Order) -> int:
        """Fork a worker and return its pid.

        :raises TimeoutError: it took more than a minute
        """
        self._pids.pop(order.name, None)
        if self._server.stdin is None:
            raise RuntimeError("the fork server reads nothing")
        self._server.stdin.write(msgspec.json.encode(order) + b"\n")
        await self._until(lambda: order.name in self._pids)
        return self._pids[order.name]

    async def steps(self, pid: int, count: int) -> None:
        """Wait until a worker has made ``count`` reports, or is gone."""
        await self._until(lambda: self._steps.get(pid, count) >= count)

    async def signal(self, pid: int, number: signal.Signals) -> None:
        """Send a signal to a worker; after SIGKILL, wait until it is gone.

        All that it has reported has been heard then.
        """
        if pid not in self._steps:
            return
        with contextlib.suppress(ProcessLookupError):  # it has ended by itself just now
            os.kill(pid, number)
        if number is signal.SIGKILL:
            await self._until(lambda: pid not in self._steps)

    async def listen(self) -> None:
        """Hear reports until the fork server ends."""
        if self._server.stdout is None:
            raise RuntimeError("the fork server says nothing")
        while line := await self._server.stdout.readline():
            report = msgspec.json.decode(line, type=Report)
            if report.word == "pid":
                self._pids[report.entry_id] = report.pid
                self._steps[report.pid] = 0
            elif report.word == "gone":
                self._steps.pop(report.pid, None)
            else:
                self._steps[report.pid] = self._steps.get(report.pid, 0) + 1
            self._receive(report)
            self._changed.set()

    async def _until(self, predicate: Callable[[], bool]) -> None:
        async with asyncio.timeout(_START_S):
            while not predicate():
                self._changed.clear()
                await self._changed.wait()


@contextlib.asynccontextmanager
async def open_workshop(hear: Callable[[Report], None]) -> AsyncIterator[Workshop]:
    """Start a fork server; leaving kills and reaps all that it forked."""
    module = "harness.crashes.forkserver"
    server = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", module),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    workshop = Workshop(server, hear)
    listening = asyncio.create_task(workshop.listen(), name="reports of workers")
    try:
        yield workshop
    finally:
        if server.stdin is not None:
            server.stdin.close()
        await listening
        await server.wait()
