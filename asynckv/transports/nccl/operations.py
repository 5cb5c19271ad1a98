"""One operation of a pipe: some bytes of a part, and where they are on their way."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable

from asynckv.tensors.cuda import DeviceMemory, Event
from asynckv.transports.nccl.parts import DevicePart
from asynckv.transports.nccl.slots import Slot
from asynckv.transports.nccl.worker_pipes import WorkerPipe

__all__ = ("Operation", "ReceiveJob", "SendJob", "call_on")


def call_on(loop: asyncio.AbstractEventLoop, fn: Callable[[], None]) -> None:
    """Let ``loop`` call ``fn`` soon; from any thread. Not if it is closed."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(fn)


class Operation:
    """Bytes of ``part`` from ``offset``; with a ``slot`` they go through it."""

    def __init__(
        self, part: DevicePart, offset: int, nbytes: int, slot: Slot | None
    ) -> None:
        self.part = part
        self.offset = offset
        self.nbytes = nbytes
        self.slot = slot
        self.number = -1
        self.is_posted = False
        """Whether the worker has it."""
        self.is_done = False
        """Whether the peer says so."""

    def address(self) -> int:
        """Where NCCL reads or writes."""
        if self.slot is not None:
            return self.slot.device.address
        return self._place().address

    def wait_until_ready(self, pipe: WorkerPipe) -> None:
        """Let the pipe's stream wait for whoever used the memory before."""
        if self.slot is None and (ready := self._place().ready) is not None:
            pipe.stream.wait(ready)

    def _place(self) -> DeviceMemory:
        if self.part.device is None:
            raise ValueError("bytes of the host need a slot")
        return self.part.device.part(self.offset, self.offset + self.nbytes)


class _Job:
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

    def settle(self, error: Exception | None) -> None:
        """Nothing touches its memory any more: tell the loop."""
        operation, settled = self._operation, self._settled
        call_on(self._loop, lambda: settled(operation, error))

    def abandon(self, error: Exception) -> None:
        """The worker was given up: tell the loop."""
        operation, settled = self._operation, self._settled
        call_on(self._loop, lambda: settled(operation, error))


class SendJob(_Job):
    """Bytes leave: those of the host were copied to pinned memory before."""

    def issue(self, pipe: WorkerPipe) -> Event:
        operation = self._operation
        operation.wait_until_ready(pipe)
        if slot := operation.slot:
            place, pinned = slot.device.address, slot.pinned.address
            pipe.cuda.copy(place, pinned, operation.nbytes, pipe.stream)
        pipe.post(operation.address(), operation.nbytes)
        return pipe.mark()


class ReceiveJob(_Job):
    """Bytes land: those of the host in pinned memory, and then where they belong."""

    def issue(self, pipe: WorkerPipe) -> Event:
        operation = self._operation
        operation.wait_until_ready(pipe)
        pipe.post(operation.address(), operation.nbytes)
        if slot := operation.slot:
            place, pinned = slot.device.address, slot.pinned.address
            pipe.cuda.copy(pinned, place, operation.nbytes, pipe.stream)
        return pipe.mark()

    def settle(self, error: Exception | None) -> None:
        operation = self._operation
        if error is None and operation.slot is not None:
            view = operation.slot.pinned.view[: operation.nbytes]
            operation.part.copy_in(operation.offset, view)
        super().settle(error)
