"""The table finds what a dict would, one by one and together, while it grows."""

from __future__ import annotations

from collections.abc import Callable

import numpy
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from asynckv.stores.disk.table import SlotTable

_numbers = st.integers(0, 2**64 - 1) | st.integers(0, 40)
_keys = st.tuples(_numbers, st.integers(0, 3))
_many = st.lists(_keys, max_size=60)


def halves(keys: list[tuple[int, int]]) -> tuple[numpy.ndarray, numpy.ndarray]:
    both = numpy.array(keys, numpy.uint64).reshape(-1, 2)
    return both[:, 0], both[:, 1]


class Tables(RuleBasedStateMachine):
    """A table beside a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.table = SlotTable()
        self.known: dict[tuple[int, int], int] = {}
        self.slots = 0

    @rule(key=_keys)
    def put(self, key: tuple[int, int]) -> None:
        self.slots += 1
        assert self.table.find(key) == self.known.get(key, -1)
        self.table.put(key, self.slots)
        self.known[key] = self.slots
        assert self.table.find(key) == self.slots

    @rule(keys=_many)
    def add_many(self, keys: list[tuple[int, int]]) -> None:
        slots = numpy.arange(len(keys)) + self.slots
        again = set(self.table.add_many(*halves(keys), slots).tolist())
        new = [at for at in range(len(keys)) if at not in again]
        assert {keys[at] for at in new} == set(keys) - set(self.known)
        assert len({keys[at] for at in new}) == len(new)
        self.known |= {keys[at]: self.slots + at for at in new}
        self.slots += len(keys)

    @rule(count=st.integers(500, 3000))
    def add_noise(self, count: int) -> None:
        noise = numpy.random.default_rng(self.slots).integers(4, 2**62, (count, 2))
        self.add_many([(int(low), int(high)) for low, high in noise])

    @rule(key=_keys)
    def remove(self, key: tuple[int, int]) -> None:
        slot = self.known.pop(key, -1)
        self.table.remove(key, slot + 1_000_000)
        assert self.table.find(key) == slot
        self.table.remove(key, slot)
        assert self.table.find(key) < 0

    @rule(share=st.integers(2, 5))
    def remove_many(self, share: int) -> None:
        gone = list(self.known)[::share]
        slots = numpy.array([self.known.pop(key) for key in gone], numpy.int64)
        self.table.remove_many(*halves(gone), slots + 1_000_000)
        self.table.remove_many(*halves(gone), slots)
        assert all(self.table.find(key) < 0 for key in gone)

    @rule(keys=_many)
    def find_many(self, keys: list[tuple[int, int]]) -> None:
        keys += list(self.known)[::7]
        found = self.table.find_many(*halves(keys)).tolist()
        assert found == [self.known.get(key, -1) for key in keys]
        assert found == [self.table.find(key) for key in keys]

    @invariant()
    def has_as_many(self) -> None:
        assert len(self.table) == len(self.known)


TestTables = Tables.TestCase
TestTables.settings = settings(max_examples=40, stateful_step_count=20, deadline=None)


def test_what_takes_long_is_left_to_others() -> None:
    left: list[Callable[[], None]] = []
    table = SlotTable(left.append)
    for number in range(3000):
        table.put((number * 2**40 + number, number), number)
    assert len(left) >= 2
    for work in left:
        work()
    assert all(
        table.find((number * 2**40 + number, number)) == number
        for number in range(3000)
    )


def test_a_table_that_was_prepared_has_room() -> None:
    table = SlotTable()
    table.prepare(100_000)
    nbytes = table.nbytes
    numbers = numpy.arange(100_000, dtype=numpy.uint64)
    assert not len(table.add_many(numbers, numbers, numbers.astype(numpy.int64)))
    assert table.nbytes == nbytes <= 84 * 100_000
    assert len(table) == 100_000
