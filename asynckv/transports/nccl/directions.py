"""The two directions of an NCCL transport: what leaves by it, and what lands.

Parts are cut into operations, offered, granted where there is a place, posted, done.
Memory is ready before a grant is said, and posted right behind it; what was offered is
not to be changed before it is quiet. On the loop only.
"""

from __future__ import annotations

import abc
import asyncio
import collections
import dataclasses
import math
import time
from collections.abc import Callable
from typing import Final

from asynckv.devices.cuda import DeviceMemory, Event
from asynckv.errors import LocalProtocolError, RemoteProtocolError
from asynckv.protocol.transfer_frames import (
    DeviceDone,
    DeviceFrame,
    DeviceGrant,
    DeviceOffer,
    DeviceSkip,
    DeviceWithdraw,
)
from asynckv.transports.nccl.rendezvous import Receiving, Sending, Step
from asynckv.transports.nccl.worker import DeviceWorker
from asynckv.transports.nccl.worker_pipes import WorkerPipe
from asynckv.transports.parts import DoneCallback, PendingParts, TransferPart, call_on

__all__ = (
    "Arrivals",
    "DevicePart",
    "Direction",
    "NcclSettings",
    "Operation",
    "Receiver",
    "Sender",
)


@dataclasses.dataclass(frozen=True, slots=True)
class NcclSettings:
    """Of one transport: each side's own, but for the smaller ``chunk_bytes`` of both.

    An operation moves at most ``chunk_bytes``; at most ``max_operations`` of them, of
    ``max_bytes``, are granted at a time, and ``max_bytes`` offered. It may take
    ``patience_s``, and more if it were slower than ``least_bytes_per_s``.
    """

    chunk_bytes: int = 4 * 2**20
    max_operations: int = 4
    max_bytes: int = 64 * 2**20
    open_s: float = 30.0
    patience_s: float = 10.0
    least_bytes_per_s: float = 50e6

    def timeout_s(self, nbytes: int) -> float:
        """How long an operation of ``nbytes`` may take, once it is granted."""
        return self.patience_s + nbytes / self.least_bytes_per_s


_NOTHING: Final = DeviceMemory(0, 0, 0)


class DevicePart(TransferPart):
    """One tensor in memory of the transport's GPU.

    ``begun_bytes`` are offered or granted, ``moved_bytes`` done. NCCL makes no digest,
    so none is told. On the loop only.
    """

    def __init__(
        self, transfer: int, number: int, memory: DeviceMemory, done: DoneCallback
    ) -> None:
        super().__init__(transfer, number, done)
        self.nbytes = memory.nbytes
        self.begun_bytes = 0
        self.operations = 0
        """How many were begun; where it is sent, those that have ended do not count."""
        self.is_skipped = False
        self._memory = memory

    @property
    def left_bytes(self) -> int:
        """Bytes that nobody has begun to move."""
        return self.nbytes - self.begun_bytes

    def begin(self, nbytes: int) -> DeviceMemory:
        """Return the next ``nbytes``, for an operation that keeps them."""
        start = self.begun_bytes
        self.begun_bytes += nbytes
        self.operations += 1
        return self._memory.part(start, self.begun_bytes)

    def release(self) -> None:
        self._memory = _NOTHING


class Operation:
    """The next ``nbytes`` of ``part``, whose memory it keeps until it has ended.

    They leave or land, as the pipe's direction is, where they lie. ``ended(operation,
    error)`` is called on the loop when nothing touches them any more, or the worker was
    given up.
    """

    def __init__(
        self,
        part: DevicePart,
        nbytes: int,
        loop: asyncio.AbstractEventLoop,
        ended: Callable[[Operation, Exception | None], None],
    ) -> None:
        self.part = part
        self.offset = part.begun_bytes
        self.nbytes = nbytes
        self.memory: DeviceMemory = part.begin(nbytes)
        self.number = -1
        self.deadline = math.inf
        self.is_done = False
        """Whether the peer says so."""
        self._loop = loop
        self._ended = ended

    def issue(self, pipe: WorkerPipe) -> Event:
        """Post it behind whoever used the memory before."""
        if self.memory.ready is not None:
            pipe.stream.wait(self.memory.ready)
        pipe.post(self.memory.address, self.nbytes)
        return pipe.mark()

    def settle(self, error: Exception | None) -> None:
        """Nothing touches its memory any more: tell the loop."""
        call_on(self._loop, self._ended, self, error)

    abandon = settle


@dataclasses.dataclass(eq=False)
class Direction(abc.ABC):
    """One end of one direction, on this side.

    ``say(frame)`` sends it; ``settled()`` is called whenever memory may be quiet.
    """

    worker: DeviceWorker
    loop: asyncio.AbstractEventLoop
    settings: NcclSettings
    say: Callable[[DeviceFrame], None]
    settled: Callable[[], None]

    def __post_init__(self) -> None:
        self._pipe: WorkerPipe | None = None
        self._pending: PendingParts[DevicePart] = PendingParts(self.loop)
        self._posted: set[Operation] = set()

    def __bool__(self) -> bool:
        """Whether somebody waits to be told of a part."""
        return bool(self._pending)

    @property
    def is_busy(self) -> bool:
        """Whether the worker has something of it."""
        return bool(self._posted)

    def open(self, pipe: WorkerPipe) -> None:
        """Its pipe is open."""
        self._pipe = pipe

    def close(self) -> None:
        """Its pipe is not open any more."""
        self._pipe = None

    def is_touched(self, transfer: int) -> bool:
        """Whether anything may still touch memory of what was stopped."""
        return any(one.part.transfer == transfer for one in self._posted)

    def _begin(self, part: DevicePart, nbytes: int) -> Operation:
        return Operation(part, nbytes, self.loop, self._ended)

    def _post(self, operation: Operation) -> None:
        if self._pipe is not None:
            self._posted.add(operation)
            timeout_s = self.settings.timeout_s(operation.nbytes)
            operation.deadline = time.monotonic() + timeout_s
            self.worker.issue(self._pipe, operation)

    @abc.abstractmethod
    def _ended(self, operation: Operation, error: Exception | None) -> None:
        """Its event has fired, or its pipe was aborted before it was posted."""

    def _complete(self, part: DevicePart) -> None:
        self._pending.complete(part)
        self.settled()


class Sender(Direction):
    """The sending end. Its operations have at most ``chunk_bytes``."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.chunk_bytes = self.settings.chunk_bytes
        self._sending: Sending[Operation] = Sending(self.settings.max_bytes)
        self._stopped: set[DevicePart] = set()
        self._queue: collections.deque[DevicePart] = collections.deque()

    @property
    def nbytes(self) -> int:
        """Of operations that are offered or granted."""
        return self._sending.nbytes

    def send(self, part: DevicePart) -> None:
        """Queue a part."""
        self._pending.add(part)
        self._queue.append(part)
        self._pump()

    def stop(self, transfer: int) -> None:
        """Offer nothing more of it, and withdraw what was not granted yet."""
        for part in self._pending.stop(transfer):
            part.release()
            if part.operations:
                self._stopped.add(part)
        for frame in self._sending.withdraw(lambda one: one.part.transfer == transfer):
            self.say(frame)

    def is_touched(self, transfer: int) -> bool:
        # What the peer may still grant would be posted.
        may_be_posted = self._pipe is not None and any(
            part.transfer == transfer for part in self._stopped
        )
        return may_be_posted or super().is_touched(transfer)

    def take_all(self) -> list[DevicePart]:
        """Forget and return the parts that nobody was told of."""
        self._stopped.clear()
        self._queue.clear()
        self._sending.forget()
        return self._pending.take_all()

    def open(self, pipe: WorkerPipe) -> None:
        super().open(pipe)
        self._pump()

    def on_grant(self, frame: DeviceGrant) -> None:
        """Post it: the peer has.

        :raises RemoteProtocolError: it makes no sense
        """
        self._post(self._sending.on_grant(frame))

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
        if operation not in self._posted:
            self._end(operation)

    def _pump(self) -> None:
        """Offer what there is room for."""
        while self._pipe is not None and self._queue and self._offer(self._queue[0]):
            pass

    def _offer(self, part: DevicePart) -> bool:
        """Offer another operation of the first part; whether there was room."""
        if part.stopped or part.is_skipped or not part.left_bytes:
            self._queue.popleft()
            if not part.nbytes:  # not within whoever sends it
                self.loop.call_soon(self._complete, part)
            return True
        nbytes = min(part.left_bytes, self.chunk_bytes)
        if not self._sending.may_offer(nbytes):
            return False
        operation = self._begin(part, nbytes)
        frame = self._sending.offer(
            operation, part.transfer, part.number, operation.offset, nbytes
        )
        operation.number = frame.number
        self.say(frame)
        return True

    def _ended(self, operation: Operation, error: Exception | None) -> None:
        self._posted.discard(operation)
        if operation.is_done:
            self._end(operation)
        else:
            self.settled()

    def _end(self, operation: Operation) -> None:
        """Neither side knows of it any more."""
        part = operation.part
        part.operations -= 1
        part.moved_bytes += operation.nbytes
        if not part.operations:
            self._stopped.discard(part)
            if part.is_skipped or part.moved_bytes == part.nbytes:
                self._complete(part)
        self.settled()
        self._pump()


class Arrivals:
    """The parts that have not landed, by transfer; None stands for one that has.

    An offer of a transfer that is not here was stopped or has landed, if its number is
    not above the highest ever announced; else the peer lies.
    """

    def __init__(self) -> None:
        self._transfers: dict[int, dict[int, DevicePart | None]] = {}
        self._highest = -1

    def announce(self, transfer: int) -> None:
        """The peer may offer bytes of transfers up to this one."""
        self._highest = max(self._highest, transfer)

    def check(self, offer: DeviceOffer) -> None:
        """Refuse what was never announced.

        :raises RemoteProtocolError: it was not
        """
        if offer.transfer > self._highest:
            raise RemoteProtocolError(
                f"an offer of transfer {offer.transfer}, never announced"
            )

    def add(self, part: DevicePart) -> None:
        """Let the peer offer this part.

        :raises LocalProtocolError: it is waited for already, or has landed
        """
        self.announce(part.transfer)
        parts = self._transfers.setdefault(part.transfer, {})
        if part.number in parts:
            raise LocalProtocolError(
                f"part {part.number} of transfer {part.transfer} received twice"
            )
        parts[part.number] = part

    def find(self, offer: DeviceOffer) -> DevicePart | None:
        """Return whose bytes these are; None if nobody wants them.

        :raises RemoteProtocolError: they are not what may come next
        """
        parts = self._transfers.get(offer.transfer)
        if parts is None:
            return None
        part = parts.get(offer.part)
        where = f"part {offer.part} of transfer {offer.transfer}"
        if part is None:
            raise RemoteProtocolError(f"{where} has landed or does not exist")
        if offer.offset != part.begun_bytes or offer.nbytes > part.left_bytes:
            raise RemoteProtocolError(
                f"{where}: {offer.nbytes} bytes at {offer.offset}, "
                f"expected {part.left_bytes} at {part.begun_bytes}"
            )
        return part

    def landed(self, part: DevicePart) -> None:
        """All of it has landed."""
        parts = self._transfers.get(part.transfer)
        if parts is not None and parts.get(part.number) is part:
            parts[part.number] = None
            if not any(parts.values()):
                del self._transfers[part.transfer]

    def landed_bytes(self, transfer: int) -> int:
        """Bytes that have landed of parts that are not whole yet."""
        parts = self._transfers.get(transfer, {}).values()
        return sum(part.moved_bytes for part in parts if part is not None)

    def stop(self, transfer: int) -> None:
        """Forget the parts of it."""
        self._transfers.pop(transfer, None)

    def clear(self) -> None:
        """Forget all of them."""
        self._transfers.clear()


class Receiver(Direction):
    """The receiving end."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.arrivals = Arrivals()
        self._receiving: Receiving[Operation] = Receiving(
            self.settings.max_operations, self.settings.max_bytes, self._place
        )

    @property
    def nbytes(self) -> int:
        """Of operations that are granted and have not landed."""
        return self._receiving.nbytes

    def receive(self, part: DevicePart) -> None:
        """Let the peer offer a part.

        :raises LocalProtocolError: it is waited for already, or has landed
        """
        if part.nbytes:
            self.arrivals.add(part)
        else:
            self.arrivals.announce(part.transfer)
            if self._pipe is not None:  # else it has ended, of which it is told
                self.loop.call_soon(self._complete, part)
        self._pending.add(part)

    def stop(self, transfer: int) -> None:
        """Grant nothing more of it."""
        self.arrivals.stop(transfer)
        for part in self._pending.stop(transfer):
            part.release()
        self._do(self._receiving.grant())

    def take_all(self) -> list[DevicePart]:
        """Forget and return the parts that nobody was told of."""
        self.arrivals.clear()
        self._receiving.forget()
        self.close()
        return self._pending.take_all()

    def open(self, pipe: WorkerPipe) -> None:
        super().open(pipe)
        self._receiving.is_open = True

    def close(self) -> None:
        super().close()
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
        operation = self._begin(part, offer.nbytes)
        operation.number = offer.number
        return operation

    def _do(self, step: Step[Operation]) -> None:
        for frame in step.frames:
            self.say(frame)
        for operation in step.posts:
            self._post(operation)

    def _ended(self, operation: Operation, error: Exception | None) -> None:
        self._posted.discard(operation)
        if error is None:
            part = operation.part
            part.moved_bytes += operation.nbytes
            if part.moved_bytes == part.nbytes:
                self.arrivals.landed(part)
                self._complete(part)
            self._do(self._receiving.on_landed(operation.number))
        self.settled()
