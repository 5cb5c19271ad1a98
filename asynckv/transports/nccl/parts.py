"""The parts that an NCCL transport moves, and the operations that they are cut into.

They lie in memory of its GPU. An offer of a transfer that is not here was stopped or
has landed, if its number is not above the highest ever announced; else the peer lies.
On the loop only.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from typing import Final

from asynckv.errors import LocalProtocolError, RemoteProtocolError
from asynckv.protocol.transfer_frames import DeviceOffer
from asynckv.tensors.cuda import DeviceMemory, Event
from asynckv.transports.nccl.worker_pipes import WorkerPipe
from asynckv.transports.parts import DoneCallback

__all__ = (
    "Arrivals",
    "DevicePart",
    "Operation",
    "OperationJob",
    "call_on",
)


logger = logging.getLogger(__name__)

_NOTHING: Final = DeviceMemory(0, 0, 0)


class DevicePart:
    """One tensor on its way: its memory, how much of it has moved, whom to tell.

    ``begun_bytes`` are offered or granted, ``moved_bytes`` done. NCCL makes no digest,
    so none is told. On the loop only.
    """

    def __init__(
        self, transfer: int, number: int, memory: DeviceMemory, done: DoneCallback
    ) -> None:
        self.transfer = transfer
        self.number = number
        self.nbytes = memory.nbytes
        self.begun_bytes = 0
        self.moved_bytes = 0
        self.operations = 0
        """How many are under way."""
        self.posted = 0
        """How many of them the worker has."""
        self.is_skipped = False
        self.is_over = False
        """Whether somebody was told, or nobody wants to be."""
        self._memory = memory
        self._done = done

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

    def stop(self) -> None:
        """Tell nobody, and begin nothing more of it."""
        self.is_over = True
        self._memory = _NOTHING

    def tell(self, error: BaseException | None = None) -> None:
        """Call ``done``, unless it was stopped. Once."""
        if self.is_over:
            return
        self.stop()
        try:
            self._done(b"", error)
        except Exception:  # of whoever waits for this part: the others still hear
            logger.exception("a payload's completion callback failed")


class Arrivals:
    """The parts that have not landed, by transfer; None stands for one that has."""

    def __init__(self) -> None:
        self._transfers: dict[int, dict[int, DevicePart | None]] = {}
        self._highest = -1

    def __bool__(self) -> bool:
        return bool(self._transfers)

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

    def parts_of(self, transfer: int) -> list[DevicePart]:
        """Those that have not landed."""
        return [part for part in self._transfers.get(transfer, {}).values() if part]

    def stop(self, transfer: int) -> list[DevicePart]:
        """Forget and return the parts of it that have not landed."""
        parts = self._transfers.pop(transfer, {})
        return [part for part in parts.values() if part is not None]

    def take_all(self) -> list[DevicePart]:
        """Forget and return all of them."""
        return [
            part for transfer in list(self._transfers) for part in self.stop(transfer)
        ]


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
