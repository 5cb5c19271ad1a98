"""The two directions of an NCCL transport: what leaves by it, and what lands.

Parts are cut into operations, offered, granted where there is a place, posted, done.
Memory is ready before a grant is said, and posted right behind it; what was offered is
not to be changed before it is quiet. On the loop only.
"""

from __future__ import annotations

import asyncio
import collections
from collections.abc import Callable

from asynckv.protocol.transfer_frames import (
    DeviceDone,
    DeviceFrame,
    DeviceGrant,
    DeviceOffer,
    DeviceSkip,
    DeviceWithdraw,
)
from asynckv.transports.nccl.parts import Arrivals, DevicePart, Operation, OperationJob
from asynckv.transports.nccl.rendezvous import Receiving, Sending, Step
from asynckv.transports.nccl.worker import DeviceWorker
from asynckv.transports.nccl.worker_pipes import WorkerPipe

__all__ = (
    "Receiver",
    "Sender",
)


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


class Receiver:
    """The receiving end of one direction.

    ``say(frame)`` sends it; ``settled()`` is called whenever memory may be quiet.
    """

    def __init__(
        self,
        worker: DeviceWorker,
        loop: asyncio.AbstractEventLoop,
        *,
        max_operations: int,
        max_bytes: int,
        timeout_s: Callable[[int], float],
        say: Callable[[DeviceFrame], None],
        settled: Callable[[], None],
    ) -> None:
        self.arrivals = Arrivals()
        self._worker = worker
        self._loop = loop
        self._timeout_s = timeout_s
        self._say = say
        self._settled = settled
        self._receiving: Receiving[Operation] = Receiving(
            max_operations, max_bytes, self._place
        )
        self._pipe: WorkerPipe | None = None
        self._under_way: set[Operation] = set()
        self._untold: set[DevicePart] = set()

    def __bool__(self) -> bool:
        """Whether somebody waits to be told of a part."""
        return bool(self._untold)

    @property
    def nbytes(self) -> int:
        """Of operations that are granted and have not landed."""
        return self._receiving.nbytes

    @property
    def is_busy(self) -> bool:
        """Whether the worker has something of it."""
        return bool(self._under_way)

    def receive(self, part: DevicePart) -> None:
        """Let the peer offer a part.

        :raises LocalProtocolError: it is waited for already, or has landed
        """
        if part.nbytes:
            self.arrivals.add(part)
            self._untold.add(part)
            return
        self.arrivals.announce(part.transfer)
        self._untold.add(part)
        self._loop.call_soon(self._tell, part)

    def landed_bytes(self, transfer: int) -> int:
        """Bytes that have landed of parts that are not whole yet."""
        return sum(part.moved_bytes for part in self.arrivals.parts_of(transfer))

    def stop(self, transfer: int) -> None:
        """Grant nothing more of it."""
        self.arrivals.stop(transfer)
        for part in [part for part in self._untold if part.transfer == transfer]:
            self._untold.discard(part)
            part.stop()
        self._do(self._receiving.grant())

    def is_touched(self, transfer: int) -> bool:
        """Whether anything may still write to memory of it."""
        return any(operation.part.transfer == transfer for operation in self._under_way)

    def take_all(self) -> list[DevicePart]:
        """Forget and return the parts that nobody was told of."""
        self.arrivals.take_all()
        self._receiving.forget()
        self.close()
        left, self._untold = list(self._untold), set()
        return left

    def open(self, pipe: WorkerPipe) -> None:
        """Its pipe is open: the peer may offer."""
        self._receiving.is_open = True
        self._pipe = pipe

    def close(self) -> None:
        """Its pipe is not open any more."""
        self._pipe = None
        self._receiving.is_open = False

    def on_offer(self, frame: DeviceOffer) -> None:
        """Grant it, now or when there is room.

        :raises RemoteProtocolError: it makes no sense
        """
        self.arrivals.check(frame)
        self._do(self._receiving.on_offer(frame))

    def on_withdraw(self, frame: DeviceWithdraw) -> None:
        """Forget the offer, if it still waits for room."""
        self._do(self._receiving.on_withdraw(frame))

    def _place(self, offer: DeviceOffer) -> Operation | None:
        part = self.arrivals.find(offer)
        if part is None:
            return None
        operation = Operation(part, offer.nbytes)
        operation.number = offer.number
        part.posted += 1
        return operation

    def _do(self, step: Step[Operation]) -> None:
        for frame in step.frames:
            self._say(frame)
        for operation in step.posts:
            self._under_way.add(operation)
            timeout_s = self._timeout_s(operation.nbytes)
            job = OperationJob(operation, self._loop, self._landed, timeout_s)
            if self._pipe is not None:
                self._worker.issue(self._pipe, job)

    def _landed(self, operation: Operation, error: Exception | None) -> None:
        self._under_way.discard(operation)
        part = operation.part
        part.operations -= 1
        part.posted -= 1
        if error is None:
            part.moved_bytes += operation.nbytes
            if part.moved_bytes == part.nbytes:
                self.arrivals.landed(part)
                self._tell(part)
            self._do(self._receiving.on_landed(operation.number))
        self._settled()

    def _tell(self, part: DevicePart) -> None:
        self._untold.discard(part)
        part.tell()
        self._settled()
