"""Which slot of pinned memory holds which bytes, of whose transfer, and who is at them.

State only: nothing here waits, copies or knows CUDA. It is called under one lock.
"""

from __future__ import annotations

import enum
from typing import Final, Protocol

__all__ = ("Slot", "SlotState", "SlotTable", "SlotUser")


class SlotState(enum.Enum):
    """What a slot is doing."""

    FREE = enum.auto()
    MOVING = enum.auto()  # a copy between it and a GPU is queued or under way
    FULL = enum.auto()  # read from a GPU; nobody is at it
    LENT = enum.auto()  # a thread reads it or writes to it
    LOST = enum.auto()  # its copy may still be under way: never used again


class SlotUser(Protocol):
    """Whose bytes a slot holds."""


class Slot:
    """One slot: bytes from ``start`` to ``stop`` of its user's memory."""

    __slots__ = ("number", "start", "state", "stop", "user")

    def __init__(self, number: int) -> None:
        self.number: Final = number
        self.state = SlotState.FREE
        self.user: SlotUser | None = None
        self.start = self.stop = 0

    def __repr__(self) -> str:
        return f"<Slot {self.number} {self.state.name} {self.start}:{self.stop}>"

    def free(self) -> None:
        """It holds nothing any more."""
        self.state = SlotState.FREE
        self.user = None


class SlotTable:
    """All slots of one GPU's staging.

    A thread that waits for a slot keeps none: so with any number of them somebody
    gets on. What was read ahead and nobody is at may be taken away again.
    """

    def __init__(self, count: int) -> None:
        self.slots = [Slot(number) for number in range(count)]
        self.waiting = 0
        """How many threads wait for a slot: nothing is read ahead meanwhile."""

    def take(self, user: SlotUser, start: int, stop: int) -> Slot | None:
        """Take a slot for bytes that ``user`` needs now, if there is one."""
        return self._give(self._free() or self._idle(), user, start, stop)

    def take_ahead(self, user: SlotUser, start: int, stop: int) -> Slot | None:
        """Take a slot for bytes that will be needed, if nobody needs it more."""
        slot = None if self.waiting else self._free()
        return self._give(slot, user, start, stop)

    def holding(self, user: SlotUser, at: int) -> Slot | None:
        """Return the slot that has, or will have, the user's byte ``at``."""
        for slot in self.slots:
            is_there = slot.user is user and slot.start <= at < slot.stop
            if is_there and slot.state is not SlotState.LOST:
                return slot
        return None

    def lent_to(self, user: SlotUser) -> Slot | None:
        """Return the slot that the user's thread is at."""
        for slot in self.slots:
            if slot.user is user and slot.state is SlotState.LENT:
                return slot
        return None

    def leave(self, user: SlotUser, before: int) -> int:
        """Free what the user's thread has done with, below ``before``: how many."""
        freed = 0
        for slot in self.slots:
            is_idle = slot.state in (SlotState.FULL, SlotState.LENT)
            if slot.user is user and is_idle and slot.stop <= before:
                slot.free()
                freed += 1
        return freed

    def moving(self, user: SlotUser) -> int:
        """How many copies of the user's are queued or under way."""
        return sum(
            slot.user is user and slot.state is SlotState.MOVING for slot in self.slots
        )

    def _free(self) -> Slot | None:
        for slot in self.slots:
            if slot.state is SlotState.FREE:
                return slot
        return None

    def _idle(self) -> Slot | None:
        for slot in self.slots:
            if slot.state is SlotState.FULL:
                return slot
        return None

    def _give(
        self, slot: Slot | None, user: SlotUser, start: int, stop: int
    ) -> Slot | None:
        if slot is not None:
            slot.state, slot.user = SlotState.MOVING, user
            slot.start, slot.stop = start, stop
        return slot
