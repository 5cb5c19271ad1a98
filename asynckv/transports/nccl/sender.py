"""What leaves by NCCL: parts are cut into operations, offered, posted, done.

On the loop only. What was offered is not to be changed before it is quiet.
"""

from __future__ import annotations

import asyncio
import collections
from collections.abc import Callable

from asynckv.protocol.transfer_frames import (
    DeviceDone,
    DeviceFrame,
    DeviceGrant,
    DeviceSkip,
)
from asynckv.transports.nccl.operations import Operation, OperationJob
from asynckv.transports.nccl.parts import DevicePart
from asynckv.transports.nccl.rendezvous import Sending
from asynckv.transports.nccl.worker import DeviceWorker
from asynckv.transports.nccl.worker_pipes import WorkerPipe

__all__ = ("Sender",)


class Sender:
    """The sending end of one direction.

    ``say(frame)`` sends it; ``settled()`` is called whenever memory may be quiet.
    """

    def __init__(
        self,
        worker: DeviceWorker,
        loop: asyncio.AbstractEventLoop,
        *,
        chunk_bytes: int,
        max_bytes: int,
        timeout_s: Callable[[int], float],
        say: Callable[[DeviceFrame], None],
        settled: Callable[[], None],
    ) -> None:
        self.chunk_bytes = chunk_bytes
        self._worker = worker
        self._loop = loop
        self._timeout_s = timeout_s
        self._say = say
        self._settled = settled
        self._sending: Sending[Operation] = Sending(max_bytes)
        self._pipe: WorkerPipe | None = None
        self._parts: dict[int, set[DevicePart]] = {}
        self._stopped: set[DevicePart] = set()
        self._queue: collections.deque[DevicePart] = collections.deque()
        self._at_worker = 0

    def __bool__(self) -> bool:
        """Whether somebody waits to be told of a part."""
        return bool(self._parts)

    @property
    def nbytes(self) -> int:
        """Of operations that are offered or granted."""
        return self._sending.nbytes

    @property
    def is_busy(self) -> bool:
        """Whether the worker has something of it."""
        return self._at_worker > 0

    def send(self, part: DevicePart) -> None:
        """Queue a part."""
        self._parts.setdefault(part.transfer, set()).add(part)
        if part.nbytes:
            self._queue.append(part)
            self._pump()
        else:
            self._loop.call_soon(self._tell, part)

    def stop(self, transfer: int) -> None:
        """Offer nothing more of it, and withdraw what was not granted yet."""
        for part in self._parts.pop(transfer, ()):
            part.stop()
            if part.operations:
                self._stopped.add(part)
        for frame in self._sending.withdraw(lambda one: one.part.transfer == transfer):
            self._say(frame)

    def is_touched(self, transfer: int) -> bool:
        """Whether anything may still read memory of it.

        Also what the peer may still grant: it would be posted.
        """
        return any(
            part.posted or (part.operations and self._pipe)
            for part in self._all_parts()
            if part.transfer == transfer
        )

    def take_all(self) -> list[DevicePart]:
        """Forget and return the parts that nobody was told of."""
        left = [part for parts in self._parts.values() for part in parts]
        self._parts.clear()
        self._stopped.clear()
        self._queue.clear()
        self._sending.forget()
        return left

    def open(self, pipe: WorkerPipe) -> None:
        """Its pipe is open: offer what waits."""
        self._pipe = pipe
        self._pump()

    def close(self) -> None:
        """Its pipe is not open any more."""
        self._pipe = None

    def on_grant(self, frame: DeviceGrant) -> None:
        """Post it: the peer has.

        :raises RemoteProtocolError: it makes no sense
        """
        operation = self._sending.on_grant(frame)
        if self._pipe is not None:
            operation.is_posted = True
            operation.part.posted += 1
            self._at_worker += 1
            timeout_s = self._timeout_s(operation.nbytes)
            job = OperationJob(operation, self._loop, self._sent, timeout_s)
            self._worker.issue(self._pipe, job)

    def on_skip(self, frame: DeviceSkip) -> None:
        """Nobody wants it, nor the rest of its part: to the sender it has left.

        :raises RemoteProtocolError: it makes no sense
        """
        operation = self._sending.on_skip(frame)
        operation.part.is_skipped = True
        self._end(operation)

    def on_done(self, frame: DeviceDone) -> None:
        """It has landed.

        :raises RemoteProtocolError: it makes no sense
        """
        operation = self._sending.on_done(frame)
        operation.is_done = True
        if not operation.is_posted:
            self._end(operation)

    def _all_parts(self) -> list[DevicePart]:
        told = [part for parts in self._parts.values() for part in parts]
        return [*told, *self._stopped]

    def _pump(self) -> None:
        """Offer what there is room for."""
        while self._pipe is not None and self._queue and self._begin(self._queue[0]):
            pass

    def _begin(self, part: DevicePart) -> bool:
        """Begin another operation of the first part; whether there was room."""
        if part.is_over or part.is_skipped or not part.left_bytes:
            self._queue.popleft()
            return True
        nbytes = min(part.left_bytes, self.chunk_bytes)
        if not self._sending.may_offer(nbytes):
            return False
        self._offer(Operation(part, nbytes))
        return True

    def _offer(self, operation: Operation) -> None:
        part = operation.part
        frame = self._sending.offer(
            operation, part.transfer, part.number, operation.offset, operation.nbytes
        )
        operation.number = frame.number
        self._say(frame)

    def _sent(self, operation: Operation, error: Exception | None) -> None:
        operation.is_posted = False
        operation.part.posted -= 1
        self._at_worker -= 1
        if operation.is_done:
            self._end(operation)
        else:
            self._settled()

    def _end(self, operation: Operation) -> None:
        """Neither side knows of it any more."""
        part = operation.part
        part.operations -= 1
        part.moved_bytes += operation.nbytes
        if not part.operations:
            self._stopped.discard(part)
            if part.is_skipped or part.moved_bytes == part.nbytes:
                self._tell(part)
        self._settled()
        self._pump()

    def _tell(self, part: DevicePart) -> None:
        parts = self._parts.get(part.transfer)
        if parts is not None:
            parts.discard(part)
            if not parts:
                del self._parts[part.transfer]
        part.tell()
        self._settled()
