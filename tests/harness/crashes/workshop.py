"""Workers in processes of their own, forked from a clean server, by name.

The server is ``python -m harness.crashes.workshop``: it has imported everything and
run none of it, reads an order a line, and ends with its standard input, killing what
it forked. A fresh interpreter would need seconds for its imports; a process that has
run torch cannot be forked.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import sys
import traceback
from collections.abc import AsyncIterator, Callable
from typing import Any, Final

import msgspec
import torch

from harness.crashes.workers import Order, Report, Word, Worker

__all__ = (
    "Workshop",
    "main",
    "open_workshop",
)


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
    module = "harness.crashes.workshop"
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


_READ_BYTES: Final = 64 * 1024


class _ForkServer:
    def __init__(self) -> None:
        self._children: set[int] = set()
        self._woken, self._waker = os.pipe()
        os.set_blocking(self._waker, False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(self._waker)

    def serve(self) -> None:
        pending = b""
        while True:
            ready, _, _ = select.select([0, self._woken], [], [])
            if self._woken in ready:
                os.read(self._woken, _READ_BYTES)
                self._reap()
            if 0 in ready:
                data = os.read(0, _READ_BYTES)
                if not data:
                    break
                *lines, pending = (pending + data).split(b"\n")
                for line in lines:
                    self._fork(msgspec.json.decode(line, type=Order))
        for child in self._children:
            os.kill(child, signal.SIGKILL)
        while self._children:
            child, _ = os.waitpid(-1, 0)
            self._children.discard(child)

    def _fork(self, order: Order) -> None:
        pid = os.fork()
        if pid:
            self._children.add(pid)
            _notify(pid, "pid", order.name)
            return
        status = 1
        try:
            self._become(order)
            status = 0
        finally:
            sys.stderr.flush()
            os._exit(status)

    def _become(self, order: Order) -> None:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for descriptor in (0, self._woken, self._waker):
            os.close(descriptor)
        torch.set_num_threads(1)
        options: dict[str, Any] = dict(order.options)
        try:
            asyncio.run(Worker(order, options).work())
        except BaseException:
            traceback.print_exc()
            raise

    def _reap(self) -> None:
        while self._children:
            child, status = os.waitpid(-1, os.WNOHANG)
            if not child:
                return
            self._children.discard(child)
            _notify(child, "gone", number=status)


def _notify(pid: int, word: Word, name: str = "", number: int = 0) -> None:
    line = msgspec.json.encode(Report(pid, word, name, number))
    os.write(1, line + b"\n")


def main() -> None:
    """Serve orders until standard input ends."""
    _ForkServer().serve()


if __name__ == "__main__":
    main()
