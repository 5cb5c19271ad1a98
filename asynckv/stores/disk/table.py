"""Which slot has a key: a hash table over 128 bits of it, in arrays.

A million keys in a ``dict`` take 200 bytes each; here it is 34 to 69, and twice as much
for a while when it grows. It grows by steps, so that no call takes a millisecond, and
many keys are looked up together. Open addressing, one place after the other.
"""

from __future__ import annotations

from typing import Final, TypeAlias

import numpy
import numpy.typing

from asynckv.stores.disk.slots import KeyHash

__all__ = ("Hashes", "Places", "SlotTable")

Hashes: TypeAlias = numpy.typing.NDArray[numpy.uint64]
Places: TypeAlias = numpy.typing.NDArray[numpy.int64]

_NOBODY: Final = 0
_GONE: Final = -1
"""A place that was somebody's: whoever looks for another goes on behind it."""

_LEAST_PLACES: Final = 1024
_FULL: Final = 0.7
_STEP: Final = 1024


class _Part:
    """Places of which some are taken. Numbers are kept as one more than they are."""

    def __init__(self, places: int) -> None:
        self.places = places
        self.taken = 0
        """Those that are gone count too."""
        # Not touched, and so not there, before somebody is in it.
        self.low: Hashes = numpy.zeros(places, numpy.uint64)
        self.high: Hashes = numpy.zeros(places, numpy.uint64)
        self.numbers: Places = numpy.zeros(places, numpy.int64)
        # Far faster one by one.
        self._low = self.low.data
        self._high = self.high.data
        self._numbers = self.numbers.data

    @property
    def nbytes(self) -> int:
        return self.low.nbytes + self.high.nbytes + self.numbers.nbytes

    def find(self, low: int, high: int) -> int:
        """Return the place of a key, or -1."""
        at, last = low & (self.places - 1), self.places - 1
        while (number := self._numbers[at]) != _NOBODY:
            is_it = number > 0 and self._low[at] == low and self._high[at] == high
            if is_it:
                return at
            at = (at + 1) & last
        return -1

    def add(self, low: int, high: int, number: int) -> None:
        """Put in what is not there."""
        at, last = low & (self.places - 1), self.places - 1
        while self._numbers[at] != _NOBODY:
            at = (at + 1) & last
        self._low[at], self._high[at], self._numbers[at] = low, high, number + 1
        self.taken += 1

    def number_at(self, at: int) -> int:
        return int(self._numbers[at]) - 1

    def set_number(self, at: int, number: int) -> None:
        self._numbers[at] = number + 1

    def drop(self, at: int) -> None:
        self._numbers[at] = _GONE

    def find_many(self, low: Hashes, high: Hashes) -> Places:
        """Return the places of keys, -1 for those that are not there."""
        found = numpy.full(len(low), -1, numpy.int64)
        at = self._first_places(low)
        looking = numpy.arange(len(low))
        while len(looking):
            here = at[looking]
            numbers = self.numbers[here]
            is_it = (self.low[here] == low[looking]) & (numbers > 0)
            is_it &= self.high[here] == high[looking]
            found[looking[is_it]] = here[is_it]
            looking = looking[~is_it & (numbers != _NOBODY)]
            at[looking] = (at[looking] + 1) & (self.places - 1)
        return found

    def add_many(self, low: Hashes, high: Hashes, numbers: Places) -> None:
        """Put in different keys that are not there, with different numbers."""
        at = self._first_places(low)
        waiting = numpy.arange(len(low))
        while len(waiting):
            here, stored = at[waiting], numbers[waiting] + 1
            is_free = self.numbers[here] == _NOBODY
            # Of those that want one place the last one gets it.
            self.numbers[here[is_free]] = stored[is_free]
            is_in = self.numbers[here] == stored
            self.low[here[is_in]] = low[waiting[is_in]]
            self.high[here[is_in]] = high[waiting[is_in]]
            waiting = waiting[~is_in]
            at[waiting] = (at[waiting] + 1) & (self.places - 1)
        self.taken += len(low)

    def _first_places(self, low: Hashes) -> Places:
        return (low & numpy.uint64(self.places - 1)).astype(numpy.int64)


class SlotTable:
    """Numbers of slots by the hashes of their keys."""

    def __init__(self) -> None:
        self._part = _Part(_LEAST_PLACES)
        self._old: _Part | None = None
        """What is being moved to the part, from its beginning on."""
        self._moved = 0
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def nbytes(self) -> int:
        """Of memory that it takes."""
        return self._part.nbytes + (self._old.nbytes if self._old else 0)

    def find(self, key: KeyHash) -> int:
        """Return the slot of a key, or -1."""
        part, at = self._place(key)
        return part.number_at(at) if at >= 0 else -1

    def find_many(self, low: Hashes, high: Hashes) -> Places:
        """Return the slots of keys, -1 for those that have none."""
        found = self._part.numbers[at := self._part.find_many(low, high)] - 1
        found[at < 0] = -1
        if self._old is not None and (missing := (at < 0).nonzero()[0]).size:
            at = self._old.find_many(low[missing], high[missing])
            numbers = self._old.numbers[at] - 1
            numbers[at < 0] = -1
            found[missing] = numbers
        return found

    def put(self, key: KeyHash, slot: int) -> int:
        """Say where a key is now; return where it was, or -1."""
        self._make_room(1)
        part, at = self._place(key)
        if at >= 0:
            before = part.number_at(at)
            part.set_number(at, slot)
            return before
        self._part.add(*key, slot)
        self._count += 1
        return -1

    def add_many(self, low: Hashes, high: Hashes, slots: Places) -> None:
        """Put in keys that are not there, each once."""
        self._make_room(len(low))
        self._part.add_many(low, high, slots)
        self._count += len(low)

    def remove(self, key: KeyHash, slot: int) -> bool:
        """Forget a key if it is in that slot; say if it was."""
        part, at = self._place(key)
        if at < 0 or part.number_at(at) != slot:
            return False
        part.drop(at)
        self._count -= 1
        return True

    def remove_many(self, low: Hashes, high: Hashes, slots: Places) -> None:
        """Forget those keys that are in these slots."""
        for part in filter(None, (self._part, self._old)):
            at = part.find_many(low, high)
            is_so = (at >= 0) & (part.numbers[at] == slots + 1)
            part.numbers[at[is_so]] = _GONE
            self._count -= int(is_so.sum())

    def _place(self, key: KeyHash) -> tuple[_Part, int]:
        at = self._part.find(*key)
        if at < 0 and self._old is not None:
            return self._old, self._old.find(*key)
        return self._part, at

    def _make_room(self, count: int) -> None:
        """See that ``count`` more fit, and go on with what is being moved."""
        self._move(_STEP + 4 * count)
        if self._part.taken + count <= _FULL * self._part.places:
            return
        if self._old is not None:  # only of a table that has hardly any places
            self._move(self._old.places)
        places = _LEAST_PLACES
        while places < 2 * (self._count + count):
            places *= 2
        self._old, self._part, self._moved = self._part, _Part(places), 0

    def _move(self, places: int) -> None:
        old = self._old
        if old is None:
            return
        span = slice(self._moved, self._moved + places)
        numbers = old.numbers[span]
        (there,) = (numbers > 0).nonzero()
        self._part.add_many(
            old.low[span][there], old.high[span][there], numbers[there] - 1
        )
        numbers[there] = _GONE
        self._moved += places
        if self._moved >= old.places:
            self._old = None
