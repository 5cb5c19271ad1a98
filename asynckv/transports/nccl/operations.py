"""One operation of a pipe: some bytes of a part, and where they are on their way."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable

from asynckv.tensors.cuda import DeviceMemory, Event
from asynckv.transports.nccl.parts import DevicePart
from asynckv.transports.nccl.worker_pipes import WorkerPipe

__all__ = ("Operation", "OperationJob", "call_on")


def call_on(loop: asyncio.AbstractEventLoop, fn: Callable[[], None]) -> None:
    """Let ``loop`` call ``fn`` soon; from any thread. Not if it is closed."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(fn)


class Operation:
    """The next ``nbytes`` of ``part``, whose memory it keeps until it has ended."""

    def __init__(self, part: DevicePart, nbytes: int) -> None:
        self.part = part
        self.offset = part.begun_bytes
        self.nbytes = nbytes
        self.memory: DeviceMemory = part.begin(nbytes)
        self.number = -1
        self.is_posted = False
        """Whether the worker has it."""
        self.is_done = False
        """Whether the peer says so."""


class OperationJob:
    """Bytes leave or land, as the pipe's direction is, where they lie."""

    def __init__(
        self,
        operation: Operation,
        loop: asyncio.AbstractEventLoop,
        settled: Callable[[Operation, Exception | None], None],
        timeout_s: float,
    ) -> None:
        self.deadline = time.monotonic() + timeout_s
        self._operation = operation
        self._loop = loop
        self._settled = settled

    def issue(self, pipe: WorkerPipe) -> Event:
        """Post it behind whoever used the memory before."""
        memory = self._operation.memory
        if memory.ready is not None:
            pipe.stream.wait(memory.ready)
        pipe.post(memory.address, memory.nbytes)
        return pipe.mark()

    def settle(self, error: Exception | None) -> None:
        """Nothing touches its memory any more: tell the loop."""
        operation, settled = self._operation, self._settled
        call_on(self._loop, lambda: settled(operation, error))

    abandon = settle
