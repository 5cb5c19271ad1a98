"""What is where on the disk, as far as it is known: the tier's state.

Rule of this file: everything runs on the loop, and nothing waits. A slot is taken by
whoever writes it, and has a value once it was written; nobody else gets it while it is
taken or read.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import numpy
import numpy.typing

from asynckv.stores.disk.segments import SLOT_BITS, Segment, oldest_of, take_free
from asynckv.stores.disk.slots import FoundSlots, KeyHash, hash_of, hashes_of
from asynckv.stores.disk.table import OffLoop, Places, SlotTable

__all__ = ("SlotIndex", "place_of")

_SLOT_MASK: Final = 2**SLOT_BITS - 1
_STEP: Final = 4096
"""So many slots are forgotten in one go."""
_RETAKEN: Final = 256
"""So many of those that are of no use are tried again at once."""

_NEVER: Final = 0


def place_of(slot: int) -> tuple[int, int]:
    """Return the number of a slot's file, and its own there."""
    return slot >> SLOT_BITS, slot & _SLOT_MASK


class SlotIndex:
    """Segments, and which of their slots has which key.

    ``off_loop`` runs what takes long where nobody waits for it, soon or never.
    """

    def __init__(self, off_loop: OffLoop = lambda work: work()) -> None:
        self.segments: dict[int, Segment] = {}
        self.evictions = 0
        self.unread = 0
        """Slots that may have a value that nobody knows: they could not be read."""
        self.file_nbytes = 0
        self._by_pages: defaultdict[int, list[Segment]] = defaultdict(list)
        self._table = SlotTable(off_loop)
        self._lost: dict[int, KeyHash] = {}
        """Slots that could not be overwritten, and which keys they may have."""
        self._readers: dict[int, int] = {}
        self._vacated: set[int] = set()
        """Slots whose value is gone, and that somebody still reads."""
        self._turn = 0
        self._expiring = self._leaving = 0
        self._hidden: set[KeyHash] | None = set()
        """Keys that were deleted while not all slots were looked at."""

    def __len__(self) -> int:
        """How many keys there are."""
        return len(self._table)

    @property
    def lost(self) -> int:
        """How many slots can be neither read nor overwritten."""
        return len(self._lost) + self.unread

    @property
    def nbytes(self) -> int:
        """Of memory that it takes."""
        segments = sum(segment.index_nbytes for segment in self.segments.values())
        return self._table.nbytes + segments

    def prepare(self, count: int) -> None:
        """Make room for so many keys before the first segment is there. In a thread."""
        self._table.prepare(count)

    def begin(self, turn: int) -> None:
        """What is wanted from now on comes after all that has a lesser sequence."""
        self._turn = turn

    def find(self, keys: Sequence[str]) -> list[int]:
        """Return the slot of each key, or -1."""
        low, high = hashes_of(keys)
        slots: list[int] = self._table.find_many(low, high).tolist()
        if self._leaving:
            slots = [slot if self._is_here(slot) else -1 for slot in slots]
        if self._expiring:
            now = time.time()
            slots = [-1 if self._is_void(slot, now) else slot for slot in slots]
        return slots

    def use(self, slots: Iterable[int]) -> None:
        """Somebody wants these values."""
        places = numpy.fromiter((slot for slot in slots if slot >= 0), numpy.int64)
        self._turn += 1
        files = places >> SLOT_BITS
        for number in numpy.unique(files).tolist():
            slots_there = places[files == number] & _SLOT_MASK
            self.segments[number].use_many(slots_there, self._turn)

    def begin_read(self, slot: int) -> None:
        """The slot is to stay as it is until :meth:`end_read`."""
        self._readers[slot] = self._readers.get(slot, 0) + 1
        self._segment_of(slot).busy += 1

    def end_read(self, slot: int) -> None:
        """One reader needs it no more."""
        self._segment_of(slot).busy -= 1
        self._readers[slot] -= 1
        if self._readers[slot]:
            return
        del self._readers[slot]
        if slot in self._vacated:
            self._vacated.discard(slot)
            self.free(slot)

    def take(self, pages: int) -> int | None:
        """Take a free slot of that size."""
        found = take_free(self._by_pages[pages])
        return None if found is None else _slot_at(*found)

    def begin_write(self, key: str, slot: int) -> None:
        """A value of that key is being written to a slot that was taken."""
        segment, at = self._place(slot)
        segment.low[at], segment.high[at] = hash_of(key)

    def evict(self, pages: int) -> int | None:
        """Take the slot of that size that nobody has wanted for longest."""
        oldest = oldest_of(self._by_pages[pages], self._is_read)
        if oldest is None:
            return None
        slot = _slot_at(oldest.segment, oldest.at)
        self._forget(slot)
        self.evictions += 1
        return slot

    def put(
        self, key: str, slot: int, sequence: int, expires_at_s: float | None
    ) -> int | None:
        """A slot that was taken has this value.

        Return the slot that has to be overwritten for it, and then :meth:`free`: of
        the value that the key had, or this one, where a later one is there already.
        """
        segment, at = self._place(slot)
        hashed = hash_of(key)
        segment.low[at], segment.high[at] = hashed
        segment.sequences[at] = sequence
        segment.expires[at] = _whole_seconds(expires_at_s)
        self._turn += 1
        return self._keep_newer(slot, hashed, self._turn)

    def remove(self, key: str, slot: int | None = None) -> int | None:
        """Forget a key (if it is in ``slot``), and return its slot, which is taken.

        It has to be overwritten, and then :meth:`free`. ``None``: nothing has to be,
        but its file may be on its way out.
        """
        hashed = hash_of(key)
        if slot is None and self._hidden is not None:
            self._hidden.add(hashed)
        found = self._table.find(hashed)
        if found < 0 or slot not in (None, found):
            return None
        return found if self._forget(found) else None

    def free(self, slot: int) -> None:
        """A slot that was taken has no value any more, on the disk either."""
        if slot in self._readers:
            self._vacated.add(slot)
        else:
            segment, at = self._place(slot)
            segment.give_back(at)

    def lose(self, slot: int) -> None:
        """A slot that was taken is of no use: nobody knows what is on the disk."""
        segment, at = self._place(slot)
        segment.lose(at)
        self._lost[slot] = (int(segment.low[at]), int(segment.high[at]))

    def retake_lost(self, key: str | None = None) -> list[int]:
        """Take slots that are of no use, or those that may have a value of ``key``.

        They are to be overwritten, and then :meth:`free`, or are lost again.
        """
        hashed = None if key is None else hash_of(key)
        slots = [slot for slot, had in self._lost.items() if hashed in (None, had)]
        for slot in slots[:_RETAKEN]:
            del self._lost[slot]
            segment, at = self._place(slot)
            segment.retake(at)
        return slots[:_RETAKEN]

    def add_segment(self, segment: Segment, *, is_free: bool) -> None:
        """Here is a file, all its slots free, or none of them looked at yet."""
        self.segments[segment.number] = segment
        self._by_pages[segment.pages].append(segment)
        self.file_nbytes += segment.nbytes
        if is_free:
            segment.note_looked_at(range(segment.count), [], [])

    def coldest_segment(self, pages: int, *, is_needed: bool) -> Segment | None:
        """Return a file that slots of another size should have the room of.

        All in it was last wanted before any of ``pages``. ``is_needed``: there is none
        of these to compare with, or that does not help.
        """
        own = oldest_of(self._by_pages[pages], self._is_read)
        if own is None and not is_needed:
            return None
        others = [
            segment
            for segment in self.segments.values()
            if not (segment.busy or segment.is_leaving or segment.pages == pages)
            and (is_needed or own is None or segment.last_used < own.turn)
        ]
        return min(others, key=lambda segment: segment.last_used, default=None)

    def forget_segment(self, segment: Segment) -> Iterator[None]:
        """Forget what is in a file that nobody uses, a part at every step.

        Its bytes count on.
        """
        segment.is_leaving = True
        self._leaving += 1
        for start in range(0, segment.count, _STEP):
            kept = segment.kept(start, start + _STEP)
            slots = kept + (segment.number << SLOT_BITS)
            expires = segment.expires[kept]
            self._expiring -= int((expires != _NEVER).sum())
            self._table.remove_many(segment.low[kept], segment.high[kept], slots)
            self.evictions += len(kept)
            yield
        self._by_pages[segment.pages].remove(segment)
        del self.segments[segment.number]
        self._leaving -= 1

    def slots_with_values(self, most: int) -> Iterator[list[int]]:
        """Yield the slots that have values just then, out of so many each time.

        Those of files that are added meanwhile are left out.
        """
        for number, segment in list(self.segments.items()):
            for start in range(0, segment.count, most):
                if segment.is_leaving or self.segments.get(number) is not segment:
                    break
                kept = segment.kept(start, start + most)
                yield (kept + (number << SLOT_BITS)).tolist()

    def add_found(
        self, number: int, slots: range, found: FoundSlots, unread: Sequence[int]
    ) -> list[int]:
        """Some slots were looked at for the first time, and these have values.

        Return those that have to be overwritten, and then :meth:`free`: of values that
        were deleted meanwhile, or of which there is a newer one.
        """
        segment = self.segments[number]
        segment.note_looked_at(slots, found.slots, unread)
        self.unread += len(unread)
        expires = numpy.minimum(numpy.ceil(found.expires), 2.0**32 - 1)
        expires[numpy.isinf(found.expires)] = _NEVER
        segment.low[found.slots] = found.low
        segment.high[found.slots] = found.high
        segment.sequences[found.slots] = found.sequences
        segment.expires[found.slots] = expires.astype(numpy.uint32)
        places = found.slots + (number << SLOT_BITS)
        again = self._table.add_many(found.low, found.high, places)
        if self._hidden:
            again = numpy.union1d(again, self._find_hidden(found, places))
        plain = numpy.delete(found.slots, again)
        segment.keep_many(plain)
        self._expiring += int((segment.expires[plain] != _NEVER).sum())
        others = found.slots[again].tolist()
        old = [self._add_again(segment, at) for at in others]
        return [slot for slot in old if slot is not None]

    def end_scan(self) -> int:
        """All slots were looked at; return the sequence of the newest value."""
        self._hidden = None
        segments = self.segments.values()
        newest = max((int(one.sequences.max(initial=0)) for one in segments), default=0)
        self._turn = max(self._turn, newest)
        return newest

    def _find_hidden(self, found: FoundSlots, places: Places) -> Places:
        """Return which of them were deleted meanwhile, and forget these."""
        keys = zip(found.low.tolist(), found.high.tolist(), strict=True)
        hidden = [at for at, key in enumerate(keys) if key in (self._hidden or ())]
        self._table.remove_many(found.low[hidden], found.high[hidden], places[hidden])
        return numpy.array(hidden, numpy.int64)

    def _add_again(self, segment: Segment, at: int) -> int | None:
        """Add one that may be there already; return what is to be overwritten."""
        slot = _slot_at(segment, at)
        hashed = (int(segment.low[at]), int(segment.high[at]))
        if self._hidden and hashed in self._hidden:
            return slot
        return self._keep_newer(slot, hashed, int(segment.sequences[at]))

    def _keep_newer(self, slot: int, hashed: KeyHash, turn: int) -> int | None:
        """The key's value is in that slot, unless a newer one is there already.

        Return what is to be overwritten: where it was, or that slot.
        """
        segment, at = self._place(slot)
        before = self._table.find(hashed)
        if before >= 0 and self._sequence_of(before) > segment.sequences[at]:
            return slot
        is_vacated = before >= 0 and self._forget(before)
        self._table.put(hashed, slot)
        self._expiring += bool(segment.expires[at] != _NEVER)
        segment.keep(at, turn)
        return before if is_vacated else None

    def _forget(self, slot: int) -> bool:
        """Take a slot that had a value; ``False`` if it goes with its whole file."""
        segment, at = self._place(slot)
        self._table.remove((int(segment.low[at]), int(segment.high[at])), slot)
        if segment.is_leaving:
            return False
        self._expiring -= bool(segment.expires[at] != _NEVER)
        segment.vacate(at)
        return True

    def _is_here(self, slot: int) -> bool:
        return slot >= 0 and not self._segment_of(slot).is_leaving

    def _is_void(self, slot: int, now: float) -> bool:
        if slot < 0:
            return True
        segment, at = self._place(slot)
        return bool(_NEVER != segment.expires[at] <= now)

    def _is_read(self, segment: Segment, at: int) -> bool:
        return _slot_at(segment, at) in self._readers

    def _sequence_of(self, slot: int) -> int:
        segment, at = self._place(slot)
        return int(segment.sequences[at])

    def _segment_of(self, slot: int) -> Segment:
        return self.segments[slot >> SLOT_BITS]

    def _place(self, slot: int) -> tuple[Segment, int]:
        return self.segments[slot >> SLOT_BITS], slot & _SLOT_MASK


def _slot_at(segment: Segment, at: int) -> int:
    return (segment.number << SLOT_BITS) + at


def _whole_seconds(expires_at_s: float | None) -> int:
    """Return when a value is void, as four bytes can say it; 0 for never."""
    if expires_at_s is None or math.isinf(expires_at_s):
        return _NEVER
    return min(max(math.ceil(expires_at_s), 1), 2**32 - 1)
