"""Which operations both sides of a pipe post, in which order. No I/O, no clock.

:class:`Sending` and :class:`Receiving` are the two ends of one direction. An operation
is offered, then granted or skipped, then done. Neither side posts what is not granted;
what is granted both sides post, whatever happens: it ends, or the pipe does. Grants
come in the order of their numbers, and so do both sides' operations.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable
from typing import Final, Generic, TypeVar

from asynckv.errors import RemoteProtocolError
from asynckv.protocol.transfer_frames import (
    DeviceDone,
    DeviceFrame,
    DeviceGrant,
    DeviceOffer,
    DeviceSkip,
    DeviceWithdraw,
)

__all__ = ("MAX_OFFERED", "Receiving", "Sending", "Step")

MAX_OFFERED: Final = 256
"""So many operations are offered at a time, and not granted: a peer's are kept."""

S = TypeVar("S")
T = TypeVar("T")


class Sending(Generic[S]):
    """The end that offers. It bounds what it has offered by ``max_bytes``.

    ``S`` is an operation of whoever uses it; one that is larger goes alone.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._next = 0
        self._last_granted = -1
        # Each with its bytes.
        self._offered: dict[int, tuple[S, int]] = {}
        self._granted: dict[int, tuple[S, int]] = {}
        self.nbytes = 0
        """Of all operations that are offered or granted."""

    def may_offer(self, nbytes: int) -> bool:
        """Whether there is room for so many bytes more."""
        if len(self._offered) >= MAX_OFFERED:
            return False
        return not self.nbytes or self.nbytes + nbytes <= self._max_bytes

    def offer(
        self, operation: S, transfer: int, part: int, offset: int, nbytes: int
    ) -> DeviceOffer:
        """Offer the next operation: what is to be said of it."""
        number, self._next = self._next, self._next + 1
        self._offered[number] = operation, nbytes
        self.nbytes += nbytes
        return DeviceOffer(number, transfer, part, offset, nbytes)

    def withdraw(self, is_void: Callable[[S], bool]) -> list[DeviceWithdraw]:
        """Withdraw operations that were not granted yet: what is to be said.

        They are over when they are skipped; or they are granted all the same.
        """
        return [
            DeviceWithdraw(number)
            for number, (operation, _) in self._offered.items()
            if is_void(operation)
        ]

    def on_grant(self, frame: DeviceGrant) -> S:
        """Return what is to be posted now.

        :raises RemoteProtocolError: it was not offered, or it comes out of order
        """
        sent = self._offered.pop(frame.number, None)
        if sent is None or frame.number <= self._last_granted:
            raise RemoteProtocolError(f"a grant of {frame.number}, out of order")
        self._last_granted = frame.number
        self._granted[frame.number] = sent
        return sent[0]

    def on_skip(self, frame: DeviceSkip) -> S:
        """Return what nobody wants.

        :raises RemoteProtocolError: it was not offered, or was granted
        """
        sent = self._offered.pop(frame.number, None)
        if sent is None:
            raise RemoteProtocolError(f"a skip of {frame.number}, which is not offered")
        return self._end(sent)

    def on_done(self, frame: DeviceDone) -> S:
        """Return what has landed.

        :raises RemoteProtocolError: it is not the oldest that was granted
        """
        if next(iter(self._granted), None) != frame.number:
            raise RemoteProtocolError(f"{frame.number} is done, out of order")
        return self._end(self._granted.pop(frame.number))

    def forget(self) -> None:
        """The pipe is over: nothing is offered or granted any more."""
        self._granted.clear()
        self._offered.clear()
        self.nbytes = 0

    def _end(self, sent: tuple[S, int]) -> S:
        operation, nbytes = sent
        self.nbytes -= nbytes
        return operation


@dataclasses.dataclass(slots=True)
class Step(Generic[T]):
    """What is to be said, and then posted, in this order."""

    frames: list[DeviceFrame] = dataclasses.field(default_factory=list)
    posts: list[T] = dataclasses.field(default_factory=list)


class Receiving(Generic[T]):
    """The end that grants: ``max_operations`` of ``max_bytes`` at a time.

    ``place(offer)`` returns where the bytes go, or None if nobody wants them (any
    more); it may raise :exc:`~asynckv.errors.RemoteProtocolError`.
    """

    def __init__(
        self,
        max_operations: int,
        max_bytes: int,
        place: Callable[[DeviceOffer], T | None],
    ) -> None:
        self.is_open = False
        """Nothing is offered while it is not."""
        self._max_operations = max_operations
        self._max_bytes = max_bytes
        self._place = place
        self._next = 0
        self._waiting: collections.deque[DeviceOffer] = collections.deque()
        self._granted: dict[int, int] = {}
        self.nbytes = 0
        """Of all operations that are granted and have not landed."""

    def on_offer(self, frame: DeviceOffer) -> Step[T]:
        """Answer an offer, now or when there is room.

        :raises RemoteProtocolError: its number, its length or its place is wrong
        """
        if not self.is_open:
            raise RemoteProtocolError("an offer by a pipe that is not open")
        if frame.number != self._next or not 0 < frame.nbytes <= self._max_bytes:
            raise RemoteProtocolError(
                f"an offer of {frame.nbytes} bytes as {frame.number}, out of order"
            )
        if len(self._waiting) >= MAX_OFFERED:
            raise RemoteProtocolError(f"more than {MAX_OFFERED} offers at a time")
        self._next += 1
        self._waiting.append(frame)
        return self.grant()

    def on_withdraw(self, frame: DeviceWithdraw) -> Step[T]:
        """The offer is void, if it still waits for room."""
        for offer in self._waiting:
            if offer.number == frame.number:
                self._waiting.remove(offer)
                return Step([DeviceSkip(frame.number)])
        return Step()

    def on_landed(self, number: int) -> Step[T]:
        """The oldest operation that was granted has landed."""
        self.nbytes -= self._granted.pop(number)
        step = self.grant()
        step.frames.insert(0, DeviceDone(number))
        return step

    def grant(self) -> Step[T]:
        """Grant or skip what waits, as far as there is room."""
        step: Step[T] = Step()
        while self._waiting and self._has_room(self._waiting[0].nbytes):
            offer = self._waiting.popleft()
            place = self._place(offer)
            if place is None:
                step.frames.append(DeviceSkip(offer.number))
                continue
            self._granted[offer.number] = offer.nbytes
            self.nbytes += offer.nbytes
            step.frames.append(DeviceGrant(offer.number))
            step.posts.append(place)
        return step

    def forget(self) -> None:
        """The pipe is over: nothing is offered or granted any more."""
        self._waiting.clear()
        self._granted.clear()
        self.nbytes = 0
        self.is_open = False

    def _has_room(self, nbytes: int) -> bool:
        if not self.is_open or len(self._granted) >= self._max_operations:
            return False
        return not self._granted or self.nbytes + nbytes <= self._max_bytes
