"""Files of slots of one size, and which of their slots goes next.

Rule of this file: everything runs on the loop, and nothing waits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, TypeAlias

import numpy
import numpy.typing

from asynckv.stores.disk.calls import PAGE_NBYTES
from asynckv.stores.disk.table import Hashes

__all__ = ("SLOT_BITS", "OldestSlot", "Segment", "oldest_of", "take_free")

SLOT_BITS: Final = 32
"""A slot's number is its segment's, then so many bits for its own there."""

_Slots: TypeAlias = numpy.typing.NDArray[numpy.int64]

# What a slot is, as one byte of its segment. Bytes are searched at once for one value.
_FREE: Final = 0
_KEPT: Final = 1
_TAKEN: Final = 2
"""It is written, was not looked at yet, or is read although its value is gone."""
_LOST: Final = 3
"""What is there can be neither read nor overwritten: it is nobody's any more."""

_NEVER: Final = 2**63 - 1
"""When a slot without a value was last used: it is never the oldest."""


class Segment:
    """Slots of ``pages`` pages each, all in one file; not looked at yet."""

    def __init__(self, number: int, pages: int, count: int) -> None:
        self.number = number
        self.pages = pages
        self.count = count
        self.is_leaving = False
        self.last_used = 0
        """The turn in which one of its slots was last used."""
        self.first_used = 0
        """None of its values was last used before that turn."""
        self.free = 0
        self.busy = count
        """How many are taken, or read: the file has to stay for them."""
        self.low: Hashes = numpy.zeros(count, numpy.uint64)
        self.high: Hashes = numpy.zeros(count, numpy.uint64)
        self.sequences: Hashes = numpy.zeros(count, numpy.uint64)
        self.expires: numpy.typing.NDArray[numpy.uint32] = numpy.zeros(
            count, numpy.uint32
        )
        self._used: _Slots = numpy.full(count, _NEVER, numpy.int64)
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
        hashes = (self.low, self.high, self.sequences)
        others = (self.expires, self._used, self._marked)
        return sum(array.nbytes for array in (*hashes, *others))

    def note_looked_at(
        self, slots: range, found: _Slots | Sequence[int], unread: Sequence[int]
    ) -> None:
        """Of these slots those are free that nothing was found in, and that were read.

        Those that something was found in stay taken.
        """
        self._marked[slots.start : slots.stop] = _FREE
        self._marked[found] = _TAKEN
        self._marked[list(unread)] = _LOST
        self.free += len(slots) - len(found) - len(unread)
        self.busy -= len(slots) - len(found)
        self._free_at = min(self._free_at, slots.start)

    def take(self) -> int:
        """Take a free slot, of which there is one."""
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

    def keep(self, at: int, turn: int) -> None:
        """A slot that was taken has a value, from this turn on."""
        self._marks[at] = _KEPT
        self._used[at] = turn
        self.busy -= 1
        self.last_used = max(self.last_used, turn)
        self.first_used = min(self.first_used, turn)

    def keep_many(self, slots: _Slots) -> None:
        """Slots that were taken have values, since they were written."""
        self._marked[slots] = _KEPT
        turns = self.sequences[slots].astype(numpy.int64)
        self._used[slots] = turns
        self.busy -= len(slots)
        self.last_used = max(self.last_used, int(turns.max(initial=0)))
        self.first_used = min(self.first_used, int(turns.min(initial=_NEVER)))

    def lose(self, at: int) -> None:
        """A slot that was taken is of no use any more."""
        self._marks[at] = _LOST
        self.busy -= 1

    def retake(self, at: int) -> None:
        """Try once more with a slot that was of no use."""
        self._marks[at] = _TAKEN
        self.busy += 1

    def vacate(self, at: int) -> None:
        """Take a slot whose value is forgotten."""
        self._marks[at] = _TAKEN
        self._used[at] = _NEVER
        self.busy += 1

    def use_many(self, slots: _Slots, turn: int) -> None:
        """Somebody wants these values, if they are there."""
        self._used[slots[self._marked[slots] == _KEPT]] = turn
        self.last_used = turn

    def kept(self, start: int, stop: int) -> _Slots:
        """Return which of some slots have values."""
        kept: _Slots
        (kept,) = (self._marked[start:stop] == _KEPT).nonzero()
        return kept + start

    def oldest(self, is_read: Callable[[Segment, int], bool]) -> tuple[int, int]:
        """Return when the oldest value was last used that nobody reads, and its slot.

        Of none it is in a turn that never comes.
        """
        at = int(self._used.argmin())
        self.first_used = turn = int(self._used[at])
        if turn == _NEVER or not is_read(self, at):
            return turn, at
        others = self._used.copy()
        while turn != _NEVER and is_read(self, at):
            others[at] = _NEVER
            at = int(others.argmin())
            turn = int(others[at])
        return turn, at


class OldestSlot(NamedTuple):
    """The slot that was not used for longest."""

    turn: int
    segment: Segment
    at: int


def take_free(segments: Sequence[Segment]) -> tuple[Segment, int] | None:
    """Take a free slot of one of ``segments``, whose slots have one size."""
    for segment in segments:
        if segment.free and not segment.is_leaving:
            return segment, segment.take()
    return None


def oldest_of(
    segments: Sequence[Segment], is_read: Callable[[Segment, int], bool]
) -> OldestSlot | None:
    """Return the slot whose value is to go; ``None`` while all are being read.

    That is the least recently used. When each one was is in an array, where thousands
    are noted together; this looks through the few segments that may have the oldest.
    """
    oldest, oldest_turn = None, _NEVER
    for segment in sorted(segments, key=lambda segment: segment.first_used):
        if segment.first_used >= oldest_turn:
            break
        if not segment.is_leaving:
            turn, at = segment.oldest(is_read)
            if turn < oldest_turn:
                oldest, oldest_turn = OldestSlot(turn, segment, at), turn
    return oldest
