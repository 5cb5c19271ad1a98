from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from hypothesis.strategies import integers, sampled_from

from asynckv.buffers.values import PendingPut, PinnedValue, StoredValues
from asynckv.errors import BufferClosed
from asynckv.tensors.arena import HeapArena, Region
from asynckv.types import KVFingerprint, TensorSpec

_MAX_BYTES = 100


def make_values(max_keys: int = 100) -> StoredValues:
    return StoredValues(HeapArena(_MAX_BYTES), lambda: None, max_keys)


def spec_of(nbytes: int) -> TensorSpec:
    return TensorSpec((nbytes,), "uint8")


def reserve(values: StoredValues, key: str, nbytes: int) -> PendingPut:
    pending = values.reserve_nowait(key, spec_of(nbytes), None)
    assert pending is not None
    return pending


def store(values: StoredValues, key: str, nbytes: int, digest: bytes = b"") -> None:
    values.commit(reserve(values, key, nbytes), digest)


def pin(values: StoredValues, key: str) -> PinnedValue:
    pinned = values.lookup(key, None)
    assert pinned is not None
    return pinned


def keys_in(values: StoredValues) -> str:
    return "".join(key for key in "abcdefgh" if values.has([key], None)[0])


def test_a_value_is_not_there_before_its_commit() -> None:
    values = make_values()
    pending = reserve(values, "a", 10)
    assert keys_in(values) == ""
    values.commit(pending, b"digest")
    assert pin(values, "a").digest == b"digest"


def test_the_least_recently_used_goes_first() -> None:
    values = make_values()
    for key in "abc":
        store(values, key, 30)
    values.release(pin(values, "a"))
    store(values, "d", 40)
    assert keys_in(values) == "acd"
    assert values.counters.evictions == 1


def test_what_is_read_is_never_dropped() -> None:
    values = make_values()
    store(values, "a", 60)
    store(values, "b", 40)
    pin(values, "a")
    assert values.reserve_nowait("c", spec_of(50), None) is None
    assert keys_in(values) == "ab", "nothing is dropped in vain"


class ArenaInPieces(HeapArena):
    """One that has free bytes, but not in one piece, while anything is charged."""

    def allocate(
        self, sizes: Sequence[int], charges: Sequence[int] = ()
    ) -> list[Region] | None:
        return None if self.used_bytes else super().allocate(sizes)


def test_nothing_is_reserved_where_free_bytes_are_not_in_one_piece() -> None:
    arena = ArenaInPieces(_MAX_BYTES)
    values = StoredValues(arena, lambda: None)
    store(values, "a", 60)
    pinned = pin(values, "a")
    assert values.reserve_nowait("b", spec_of(40), None) is None
    values.release(pinned)
    store(values, "b", 40)
    assert keys_in(values) == "b"


class ArenaWithLess(HeapArena):
    """One that has 60 of its bytes; views may have some of what was given back."""

    is_growing = False
    pinned_bytes = 0

    def allocate(
        self, sizes: Sequence[int], charges: Sequence[int] = ()
    ) -> list[Region] | None:
        nbytes = self.used_bytes + self.pinned_bytes + sum(sizes)
        return None if nbytes > 60 else super().allocate(sizes)


def test_while_the_arena_grows_no_more_is_dropped_than_it_could_ever_hold() -> None:
    arena = ArenaWithLess(_MAX_BYTES)
    values = StoredValues(arena, lambda: None)
    for key in "abc":
        store(values, key, 10)
    reserve(values, "d", 30)
    arena.is_growing = True
    assert values.reserve_nowait("e", spec_of(45), None) is None
    assert keys_in(values) == "bc"


def test_nothing_is_dropped_for_what_views_of_dropped_values_leave_no_room() -> None:
    arena = ArenaWithLess(_MAX_BYTES)
    values = StoredValues(arena, lambda: None)
    store(values, "a", 30)
    arena.pinned_bytes = 30
    assert values.reserve_nowait("b", spec_of(71), None) is None
    assert keys_in(values) == "a"


def test_the_replaced_value_is_dropped_last() -> None:
    values = make_values()
    store(values, "a", 40)
    store(values, "b", 40)
    reserve(values, "a", 50)
    assert keys_in(values) == "a"


def test_the_replaced_value_is_dropped_where_both_do_not_fit() -> None:
    values = make_values()
    store(values, "a", 60)
    store(values, "a", 70)
    assert (keys_in(values), values.counters.evictions) == ("a", 1)


def test_a_reader_keeps_the_value_that_is_replaced() -> None:
    arena = HeapArena(_MAX_BYTES)
    values = StoredValues(arena, lambda: None)
    store(values, "a", 10, b"old")
    old = pin(values, "a")
    store(values, "a", 20, b"new")
    assert (old.digest, pin(values, "a").digest) == (b"old", b"new")
    assert arena.used_bytes == 30
    values.release(old)
    assert arena.used_bytes == 20


def test_a_second_release_does_nothing() -> None:
    values = make_values()
    store(values, "a", 10)
    once, other = pin(values, "a"), pin(values, "a")
    values.release(once)
    values.release(once)
    assert values.reserve_nowait("b", spec_of(100), None) is None
    values.release(other)
    assert keys_in(values) == "a"
    store(values, "b", 100)


def test_a_discarded_put_leaves_no_trace() -> None:
    values = make_values()
    pending = reserve(values, "a", 100)
    values.discard(pending)
    values.discard(pending)
    store(values, "b", 100)


def test_a_put_is_committed_once() -> None:
    values = make_values()
    pending = reserve(values, "a", 1)
    values.commit(pending, b"")
    values.discard(pending)
    with pytest.raises(RuntimeError, match="before"):
        values.commit(pending, b"")
    assert keys_in(values) == "a"


def test_another_models_value_is_another_value() -> None:
    values = make_values()
    store(values, "a", 1)
    assert values.has(["a"], KVFingerprint(model="m")) == (False,)


def test_the_number_of_keys_is_bounded_too() -> None:
    values = make_values(max_keys=2)
    for key in "abc":
        store(values, key, 0)
    assert keys_in(values) == "bc"


def test_keys_that_are_all_read_may_exceed_their_number() -> None:
    values = make_values(max_keys=1)
    store(values, "a", 0)
    pin(values, "a")
    store(values, "b", 0)
    assert keys_in(values) == "ab"


def test_closing_forgets_all_but_what_is_read() -> None:
    arena = HeapArena(_MAX_BYTES)
    values = StoredValues(arena, lambda: None)
    store(values, "a", 10)
    store(values, "b", 20)
    pinned = pin(values, "b")
    values.close()
    assert (len(values), arena.used_bytes) == (0, 20)
    values.release(pinned)
    assert arena.used_bytes == 0


def test_a_put_that_ends_after_the_closing_is_discarded() -> None:
    arena = HeapArena(_MAX_BYTES)
    values = StoredValues(arena, lambda: None)
    pending = reserve(values, "a", 10)
    values.close()
    with pytest.raises(BufferClosed):
        values.commit(pending, b"")
    assert (len(values), arena.used_bytes) == (0, 0)


_KEYS = sampled_from("abcde")


class ValuesAsADict(RuleBasedStateMachine):
    """Stored values beside a dict in order of last use, and a list of readers."""

    def __init__(self) -> None:
        super().__init__()
        self.arena = HeapArena(_MAX_BYTES)
        self.stored = StoredValues(self.arena, lambda: None)
        self.values: dict[str, tuple[int, bytes]] = {}
        self.pending: list[tuple[str, PendingPut, bytes]] = []
        self.readers: list[tuple[str, PinnedValue, bytes]] = []
        self.count = 0

    def used_bytes(self) -> int:
        read = {id(p.region): p.region.nbytes for _, p, _ in self.readers}
        stored = sum(
            nbytes
            for key, (nbytes, digest) in self.values.items()
            if (key, digest) not in {(k, d) for k, _, d in self.readers}
        )
        return (
            stored + sum(read.values()) + sum(p.spec.nbytes for _, p, _ in self.pending)
        )

    def is_read(self, key: str) -> bool:
        return any((k, d) == (key, self.values[key][1]) for k, _, d in self.readers)

    def room(self, key: str, nbytes: int) -> list[str] | None:
        """What is dropped to make room, or None if that does not help."""
        idle = [k for k in self.values if not self.is_read(k) and k != key]
        if key in self.values and not self.is_read(key):
            idle.append(key)
        free, victims = _MAX_BYTES - self.used_bytes(), list[str]()
        for victim in idle:
            if nbytes <= free:
                break
            free += self.values[victim][0]
            victims.append(victim)
        return victims if nbytes <= free else None

    @rule(key=_KEYS, nbytes=integers(0, _MAX_BYTES))
    def reserve(self, key: str, nbytes: int) -> None:
        victims = self.room(key, nbytes)
        pending = self.stored.reserve_nowait(key, spec_of(nbytes), None)
        assert (pending is None) == (victims is None)
        for victim in victims or ():
            del self.values[victim]
        if pending is not None:
            self.count += 1
            self.pending.append((key, pending, str(self.count).encode()))

    @precondition(lambda self: self.pending)
    @rule(index=integers(0), commits=sampled_from([True, True, False]))
    def end_put(self, index: int, commits: bool) -> None:
        key, pending, digest = self.pending.pop(index % len(self.pending))
        if not commits:
            self.stored.discard(pending)
            return
        self.stored.commit(pending, digest)
        self.values.pop(key, None)
        self.values[key] = (pending.spec.nbytes, digest)

    @rule(key=_KEYS)
    def pin(self, key: str) -> None:
        pinned = self.stored.lookup(key, None)
        assert (pinned is None) == (key not in self.values)
        if pinned is not None:
            assert pinned.digest == self.values[key][1]
            self.readers.append((key, pinned, pinned.digest))

    @precondition(lambda self: self.readers)
    @rule(index=integers(0))
    def release(self, index: int) -> None:
        key, pinned, digest = self.readers.pop(index % len(self.readers))
        self.stored.release(pinned)
        value = self.values.get(key)
        if value is not None and value[1] == digest and not self.is_read(key):
            self.values[key] = self.values.pop(key)  # now the most recently used

    @rule(key=_KEYS)
    def delete(self, key: str) -> None:
        assert self.stored.remove(key, None) == (key in self.values)
        self.values.pop(key, None)

    @invariant()
    def they_agree(self) -> None:
        assert keys_in(self.stored) == "".join(sorted(self.values))
        assert self.arena.used_bytes == self.used_bytes() <= _MAX_BYTES


ValuesAsADict.TestCase.settings = settings(max_examples=60, deadline=None)
test_it_behaves_as_a_dict_with_an_order = ValuesAsADict.TestCase
