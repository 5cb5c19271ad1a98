"""Files of slots of one size, and which of their slots goes next.

Rule of this file: everything runs on the loop, and nothing waits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final, TypeAlias

import numpy
import numpy.typing

from asynckv.stores.disk.calls import PAGE_NBYTES
from asynckv.stores.disk.table import Hashes

__all__ = ("SLOT_BITS", "Segment", "SlotClass")

SLOT_BITS: Final = 32
"""A slot's number is its segment's, then so many bits for its own there."""

_Slots: TypeAlias = numpy.typing.NDArray[numpy.int64]

# What a slot is, as one byte of its segment. Bytes are searched at once for one value.
_FREE: Final = 0
_KEPT: Final = 1
_USED: Final = 3
"""As _KEPT, and somebody wanted it since the hand was there."""
_TAKEN: Final = 4
"""It is written, was not looked at yet, or is read although its value is gone."""
_LOST: Final = 8
"""What is there can be neither read nor overwritten: it is nobody's any more."""

_WITHOUT_USE: Final = numpy.uint8(0xFF ^ _KEPT ^ _USED)


class Segment:
    """Slots of ``pages`` pages each, all in one file; not looked at yet."""

    def __init__(self, number: int, pages: int, count: int) -> None:
        self.number = number
        self.pages = pages
        self.count = count
        self.is_leaving = False
        self.last_used = 0
        """When one of its slots was last wanted, in turns of the index."""
        self.free = 0
        self.busy = count
        """How many are taken, or read: the file has to stay for them."""
        self.low: Hashes = numpy.zeros(count, numpy.uint64)
        self.high: Hashes = numpy.zeros(count, numpy.uint64)
        self.sequences: Hashes = numpy.zeros(count, numpy.uint64)
        self.expires: numpy.typing.NDArray[numpy.uint32] = numpy.zeros(
            count, numpy.uint32
        )
        self._marks = bytearray([_TAKEN]) * count
        self._marked = numpy.frombuffer(self._marks, numpy.uint8)
        self._free_at = 0

    @property
    def nbytes(self) -> int:
        """Of the file."""
        return self.count * self.pages * PAGE_NBYTES

    @property
    def index_nbytes(self) -> int:
        """Of memory that it takes."""
        arrays = (self.low, self.high, self.sequences, self.expires, self._marked)
        return sum(array.nbytes for array in arrays)

    def note_looked_at(
        self, slots: range, found: _Slots | Sequence[int], unread: Sequence[int]
    ) -> None:
        """Of these slots those are free that nothing was found in, and that were read.

        Those that something was found in stay taken.
        """
        looked_at = self._marked[slots.start : slots.stop]
        looked_at[:] = _FREE
        self._marked[found] = _TAKEN
        self._marked[list(unread)] = _LOST
        self.free += len(slots) - len(found) - len(unread)
        self.busy -= len(slots) - len(found)
        self._free_at = min(self._free_at, slots.start)

    def take(self) -> int | None:
        """Take a free slot."""
        if not self.free:
            return None
        at = self._marks.find(_FREE, self._free_at)
        self.free -= 1
        self.busy += 1
        self._marks[at] = _TAKEN
        self._free_at = at + 1
        return at

    def give_back(self, at: int) -> None:
        """A slot that was taken is free."""
        self._marks[at] = _FREE
        self.busy -= 1
        self.free += 1
        self._free_at = min(self._free_at, at)

    def keep(self, at: int) -> None:
        """A slot that was taken has a new value: somebody wanted that."""
        self._marks[at] = _USED
        self.busy -= 1

    def keep_many(self, slots: _Slots) -> None:
        """Slots that were taken have had values for long."""
        self._marked[slots] = _KEPT
        self.busy -= len(slots)

    def lose(self, at: int) -> None:
        """A slot that was taken is of no use any more."""
        self._marks[at] = _LOST
        self.busy -= 1

    def vacate(self, at: int) -> None:
        """Take a slot whose value is forgotten."""
        self._marks[at] = _TAKEN
        self.busy += 1

    def use(self, at: int) -> None:
        """Somebody wants the value."""
        if self._marks[at] == _KEPT:
            self._marks[at] = _USED

    def use_many(self, slots: _Slots) -> None:
        """Somebody wants the values."""
        self._marked[slots[self._marked[slots] == _KEPT]] = _USED

    def is_kept(self, at: int) -> bool:
        """Has it a value?"""
        return bool(self._marks[at] & _KEPT)

    def kept(self, start: int, stop: int) -> _Slots:
        """Return which of some slots have values."""
        kept: _Slots
        (kept,) = (self._marked[start:stop] & _KEPT).nonzero()
        return kept + start

    def next_unused(self, start: int) -> int | None:
        """Return the next slot that nobody wanted since this was last asked here.

        Those before it count as not wanted from now on.
        """
        found = self._marks.find(_KEPT, start)
        self._marked[start : found if found >= 0 else self.count] &= _WITHOUT_USE
        return found if found >= 0 else None


class SlotClass:
    """The segments whose slots have one size, and who leaves when they are full.

    That is by second chance, which is nearly the least recently used: a hand goes
    round, passes over whoever was wanted since it was there, and takes the next. An
    exact order would take 16 bytes a slot and a microsecond for each one that is
    wanted, and thousands are at once. After a restart the hand goes on behind the slot
    that was written last.
    """

    def __init__(self) -> None:
        self.segments: list[Segment] = []
        self.round_began = 0
        """When the round before this one began: all there is was wanted, or came,
        since then."""
        self._this_round_began = 0
        self._hand: tuple[int, int] = (0, 0)

    def add(self, segment: Segment) -> None:
        self.segments.append(segment)

    def remove(self, segment: Segment) -> None:
        turn, at = self._hand
        place = self.segments.index(segment)
        del self.segments[place]
        if place <= turn:
            self._hand = (turn - 1, at) if place < turn else (turn, 0)

    def go_on_behind(self, segment: Segment, at: int) -> None:
        """The oldest value is the next one."""
        self._hand = (self.segments.index(segment), at + 1)

    def take(self) -> tuple[Segment, int] | None:
        """Take a free slot."""
        for segment in self.segments:
            if segment.free and not segment.is_leaving:
                at = segment.take()
                return None if at is None else (segment, at)
        return None

    def next_victim(
        self, is_read: Callable[[Segment, int], bool], now: int
    ) -> tuple[Segment, int] | None:
        """Return the slot whose value is to go; ``None`` while all are being read."""
        for segment, start in self._round(now):
            at = segment.next_unused(start)
            while at is not None and is_read(segment, at):
                at = segment.next_unused(at + 1)
            if at is not None:
                self._hand = (self.segments.index(segment), at + 1)
                return segment, at
        return None

    def _round(self, now: int) -> Iterator[tuple[Segment, int]]:
        """Yield segments from the hand on, and where to begin in each: two rounds."""
        turn, at = self._hand
        for _ in range(2 * len(self.segments) + 1 if self.segments else 0):
            if turn >= len(self.segments):
                self.round_began, self._this_round_began = self._this_round_began, now
                turn = 0
            segment = self.segments[turn]
            if not segment.is_leaving:
                yield segment, at
            turn, at = turn + 1, 0
