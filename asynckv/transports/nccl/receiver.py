"""What lands by NCCL: offers are granted where there is a place, posted, and done.

On the loop only. Memory is ready before a grant is said, and posted right behind it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from asynckv.protocol.transfer_frames import DeviceFrame, DeviceOffer, DeviceWithdraw
from asynckv.transports.nccl.operations import Operation, OperationJob
from asynckv.transports.nccl.parts import Arrivals, DevicePart
from asynckv.transports.nccl.rendezvous import Receiving, Step
from asynckv.transports.nccl.worker import DeviceWorker
from asynckv.transports.nccl.worker_pipes import WorkerPipe

__all__ = ("Receiver",)


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
