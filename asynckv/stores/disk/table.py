"""Which slot has a key: a hash table over 128 bits of it, in one array.

A million keys in a ``dict`` take 200 bytes each; here it is 37 to 110, and 120 for a
while as it grows. It grows by steps, so that no call takes a millisecond, and many keys
are looked up together. Open addressing, by double hashing.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from collections.abc import Callable
from typing import Final, TypeAlias

import numpy
import numpy.typing

from asynckv.stores.disk.slots import KeyHash

__all__ = ("Hashes", "OffLoop", "Places", "SlotTable")

Hashes: TypeAlias = numpy.typing.NDArray[numpy.uint64]
Places: TypeAlias = numpy.typing.NDArray[numpy.int64]
OffLoop: TypeAlias = Callable[[Callable[[], None]], None]

_NOBODY: Final = 0
_GONE: Final = 1
"""A place that was somebody's: whoever looks for another goes on behind it."""
_FIRST: Final = 2
"""What stands for the slot 0."""

_LEAST_PLACES: Final = 1024
_NEARLY_FULL: Final = 0.6
_FULL: Final = 0.65
_FEW: Final = 24
"""So few are sooner done one by one."""

_MADV_POPULATE_WRITE: Final = 23
_MOVED_AT_LEAST: Final = 64
_MOVED_FOR_EACH: Final = 2
"""Places that are moved for each key that comes: all are, before it grows again."""


class _Part:
    """Places of which some are taken: three numbers each, side by side."""

    def __init__(self, places: int) -> None:
        self.places = places
        self.taken = 0
        """Those that are gone count too."""
        rows = _zeros(3 * places)
        self.low, self.high, self.slots = rows.reshape(-1, 3).T
        self.nbytes = rows.nbytes
        # Far faster one by one.
        self._rows = rows.data
        self._address = rows.ctypes.data

    def populate(self) -> None:
        """Have the system find memory for it, which takes long. In a thread."""
        _advise(self._address, self.nbytes, _MADV_POPULATE_WRITE)

    def discard(self) -> None:
        """Give its memory back, which takes long: it is not looked at again."""
        _advise(self._address, self.nbytes, mmap.MADV_DONTNEED)

    def find(self, low: int, high: int) -> int:
        """Return the place of a key, or -1."""
        rows, last = self._rows, self.places - 1
        at, step = low & last, (high & last) | 1
        while (slot := rows[3 * at + 2]) != _NOBODY:
            if slot > _GONE and rows[3 * at] == low and rows[3 * at + 1] == high:
                return at
            at = (at + step) & last
        return -1

    def add(self, low: int, high: int, slot: int) -> None:
        """Put in what is not there."""
        rows, last = self._rows, self.places - 1
        at, step = low & last, (high & last) | 1
        while rows[3 * at + 2] != _NOBODY:
            at = (at + step) & last
        rows[3 * at], rows[3 * at + 1], rows[3 * at + 2] = low, high, slot + _FIRST
        self.taken += 1

    def slot_at(self, at: int) -> int:
        return self._rows[3 * at + 2] - _FIRST

    def set_slot(self, at: int, slot: int) -> None:
        self._rows[3 * at + 2] = slot + _FIRST

    def drop(self, at: int) -> None:
        self._rows[3 * at + 2] = _GONE

    def slots_at(self, at: Places) -> Places:
        """Return the slots in some places, -1 for the place -1."""
        slots = self.slots[at].astype(numpy.int64) - _FIRST
        slots[at < 0] = -1
        return slots

    def find_many(self, low: Hashes, high: Hashes) -> Places:
        """Return the places of keys, -1 for those that are not there."""
        found = numpy.full(len(low), -1, numpy.int64)
        at, steps = self._walks(low, high)
        looking = numpy.arange(len(low))
        while len(looking) > _FEW:
            here = at[looking]
            slots = self.slots[here]
            is_it = (self.low[here] == low[looking]) & (slots > _GONE)
            is_it &= self.high[here] == high[looking]
            found[looking[is_it]] = here[is_it]
            looking = looking[~is_it & (slots != _NOBODY)]
            at[looking] = (at[looking] + steps[looking]) & (self.places - 1)
        for one in looking.tolist():
            found[one] = self.find(int(low[one]), int(high[one]))
        return found

    def add_many(self, low: Hashes, high: Hashes, slots: Places) -> Places:
        """Put keys in, with different slots; return which were there already."""
        at, steps = self._walks(low, high)
        stored = slots.astype(numpy.uint64) + numpy.uint64(_FIRST)
        waiting = numpy.arange(len(low))
        there: list[int] = []
        while len(waiting) > _FEW:
            here, mine = at[waiting], stored[waiting]
            is_free = (found := self.slots[here]) == _NOBODY
            # Of those that want one place the last one gets it.
            self.slots[here[is_free]] = mine[is_free]
            is_in = is_free & (self.slots[here] == mine)
            self.low[here[is_in]] = low[waiting[is_in]]
            self.high[here[is_in]] = high[waiting[is_in]]
            is_there = (self.low[here] == low[waiting]) & ~is_in & (found > _GONE)
            is_there &= self.high[here] == high[waiting]
            there += waiting[is_there].tolist()
            # Who has not got a place looks at it again: it may be the same key's now.
            at[waiting[~is_free]] += steps[waiting[~is_free]]
            waiting = waiting[~(is_in | is_there)]
            at[waiting] &= self.places - 1
        self.taken += len(low) - len(waiting) - len(there)
        for one in waiting.tolist():
            key = int(low[one]), int(high[one])
            if self.find(*key) < 0:
                self.add(*key, int(slots[one]))
            else:
                there.append(one)
        return numpy.array(there, numpy.int64)

    def _walks(self, low: Hashes, high: Hashes) -> tuple[Places, Places]:
        """Return where each key is looked for first, and how far on then.

        Each goes another way, so that none of many has to go far; any odd number leads
        to all places.
        """
        last = numpy.uint64(self.places - 1)
        first = (low & last).astype(numpy.int64)
        return first, (high & last).astype(numpy.int64) | 1


class SlotTable:
    """Numbers of slots by the hashes of their keys.

    ``off_loop`` runs what takes long where nobody waits for it, soon or never.
    """

    def __init__(self, off_loop: OffLoop = lambda work: work()) -> None:
        self._off_loop = off_loop
        self._part = _Part(_LEAST_PLACES)
        self._next: _Part | None = None
        """What is there for when the part is full."""
        self._old: _Part | None = None
        """What is being moved to the part, from its beginning on."""
        self._moved = 0
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def nbytes(self) -> int:
        """Of memory that it takes."""
        parts = (self._part, self._old, self._next)
        return sum(part.nbytes for part in parts if part is not None)

    def prepare(self, count: int) -> None:
        """Make room for so many keys before the first one comes. In a thread."""
        self._part = _Part(self._places_for(count))
        self._part.populate()

    def find(self, key: KeyHash) -> int:
        """Return the slot of a key, or -1."""
        part, at = self._place(key)
        return part.slot_at(at) if at >= 0 else -1

    def find_many(self, low: Hashes, high: Hashes) -> Places:
        """Return the slots of keys, -1 for those that have none."""
        found = self._part.slots_at(self._part.find_many(low, high))
        if self._old is not None and (missing := (found < 0).nonzero()[0]).size:
            at = self._old.find_many(low[missing], high[missing])
            found[missing] = self._old.slots_at(at)
        return found

    def put(self, key: KeyHash, slot: int) -> None:
        """Say where a key is now."""
        self._make_room(1)
        part, at = self._place(key)
        if at >= 0:
            part.set_slot(at, slot)
        else:
            self._part.add(*key, slot)
            self._count += 1

    def add_many(self, low: Hashes, high: Hashes, slots: Places) -> Places:
        """Put in those keys that are not there; return which were, or are twice."""
        self._make_room(len(low))
        if self._old is None:
            again = self._part.add_many(low, high, slots)
        else:
            is_new = self._old.find_many(low, high) < 0
            (new,), (old,) = is_new.nonzero(), (~is_new).nonzero()
            twice = new[self._part.add_many(low[new], high[new], slots[new])]
            again = numpy.concatenate((old, twice))
        self._count += len(low) - len(again)
        return again

    def remove(self, key: KeyHash, slot: int) -> None:
        """Forget a key if it is in that slot."""
        part, at = self._place(key)
        if at >= 0 and part.slot_at(at) == slot:
            part.drop(at)
            self._count -= 1

    def remove_many(self, low: Hashes, high: Hashes, slots: Places) -> None:
        """Forget those keys that are in these slots."""
        for part in filter(None, (self._part, self._old)):
            at = part.find_many(low, high)
            is_so = (at >= 0) & (part.slots_at(at) == slots)
            part.slots[at[is_so]] = _GONE
            self._count -= int(is_so.sum())

    def _place(self, key: KeyHash) -> tuple[_Part, int]:
        at = self._part.find(*key)
        if at < 0 and self._old is not None:
            return self._old, self._old.find(*key)
        return self._part, at

    def _make_room(self, count: int) -> None:
        """See that ``count`` more fit, and go on with what is being moved."""
        self._move(_MOVED_AT_LEAST + _MOVED_FOR_EACH * count)
        taken = self._part.taken + count
        if self._next is None and taken > _NEARLY_FULL * self._part.places:
            self._next = _Part(self._places_for(count))
            self._off_loop(self._next.populate)
        if taken <= _FULL * self._part.places:
            return
        if self._old is not None:  # only of a table that has hardly any places
            self._move(self._old.places)
        part, self._next = self._next, None
        if part is None or part.places < self._places_for(count):
            part = _Part(self._places_for(count))
        self._old, self._part, self._moved = self._part, part, 0

    def _places_for(self, count: int) -> int:
        places = _LEAST_PLACES
        while places < 2 * (self._count + count):
            places *= 2
        return places

    def _move(self, places: int) -> None:
        old = self._old
        if old is None:
            return
        span = slice(self._moved, self._moved + places)
        (there,) = (old.slots[span] > _GONE).nonzero()
        there += self._moved
        slots = old.slots[there].astype(numpy.int64) - _FIRST
        self._part.add_many(old.low[there], old.high[there], slots)
        old.slots[there] = _GONE
        self._moved += places
        if self._moved >= old.places:
            self._old = None
            self._off_loop(old.discard)


def _zeros(count: int) -> Hashes:
    """Return memory that is there where it is touched, and not before.

    numpy would ask for huge pages, and the first keys in them would wait until all of
    it is cleared.
    """
    memory = mmap.mmap(-1, 8 * count, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(AttributeError, OSError):
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return numpy.frombuffer(memory, numpy.uint64)


def _advise(address: int, nbytes: int, advice: int) -> None:
    """Tell the system about memory; by ctypes, which lets the GIL go meanwhile.

    An old kernel refuses to populate it; then that is done when it is touched.
    """
    ctypes.CDLL(None).madvise(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), advice)
