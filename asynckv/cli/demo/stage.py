"""A worker's side of the demo: orders in, notes out, and an end with its parent."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable

from asynckv.cli.demo.messages import Failed, Note, Order, decode_order, encode_line

__all__ = ("Stage",)

_LIMIT = 1 << 24
_EXIT_GRACE_S = 1.0


class Stage:
    """Where a worker gets its orders and says what became of them.

    It takes the standard output for itself: whatever else prints goes to the
    standard error.
    """

    def __init__(self) -> None:
        self._output = os.dup(sys.stdout.fileno())
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        self._lock = threading.Lock()

    def send(self, note: Note) -> None:
        """Write one note; any thread may, and the parent reads at once."""
        line = encode_line(note)
        with self._lock:
            os.write(self._output, line)

    async def orders(self) -> AsyncIterator[Order]:
        """Yield what the parent asks for, until it hangs up."""
        reader = asyncio.StreamReader(limit=_LIMIT)
        protocol = asyncio.StreamReaderProtocol(reader)
        loop = asyncio.get_running_loop()
        transport, _ = await loop.connect_read_pipe(lambda: protocol, sys.stdin)
        try:
            while line := await reader.readline():
                yield decode_order(line)
        finally:
            transport.close()

    async def perform(self, do: Callable[[Order], Awaitable[Note]]) -> None:
        """Carry out each order in a task of its own, until the parent hangs up.

        What is under way then is cancelled; a forward pass that does not end
        within a second is cut off with the process.
        """
        under_way: set[asyncio.Task[None]] = set()
        async for order in self.orders():
            task = asyncio.create_task(self._perform_one(do, order))
            under_way.add(task)
            task.add_done_callback(under_way.discard)
        deadline = threading.Timer(_EXIT_GRACE_S, os._exit, (0,))
        deadline.daemon = True
        deadline.start()
        for task in under_way:
            task.cancel()
        if under_way:
            await asyncio.wait(under_way)

    async def _perform_one(
        self, do: Callable[[Order], Awaitable[Note]], order: Order
    ) -> None:
        try:
            note = await do(order)
        except Exception as exc:  # noqa: BLE001 - the parent is told, and ends the run
            note = Failed(f"{type(exc).__name__}: {exc}")
        self.send(note)
