"""Values by name, in so many bytes: which of them is dropped, and who waits."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Sequence

import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from hypothesis.strategies import integers, sampled_from

from asynckv import BufferClosed, EntryTooLarge, KVFingerprint, TensorSpec
from asynckv.buffers.values import PendingPut, PinnedValue, StoredValues
from asynckv.tensors.arena import HeapArena, Region
from asynckv.testing import until_blocked
from asynckv.testing.lookup_checks.values import cancelled
from harness.ledgers import RecordingTiers

_MAX_BYTES = 100


def make_values(max_keys: int = 100) -> StoredValues:
    return StoredValues(HeapArena(_MAX_BYTES), lambda: None, max_keys)


@pytest.fixture
def values() -> StoredValues:
    return make_values()


def spec_of(nbytes: int) -> TensorSpec:
    return TensorSpec((nbytes,), "uint8")


def reserve(values: StoredValues, key: str, nbytes: int) -> PendingPut:
    pending = values.reserve_nowait(key, spec_of(nbytes), None)
    assert pending is not None
    return pending


def store(values: StoredValues, key: str, nbytes: int, digest: bytes = b"") -> None:
    values.commit(reserve(values, key, nbytes), digest)


def full_of(arena: HeapArena) -> StoredValues:
    """Return values of one byte each that leave no room."""
    values = StoredValues(arena, lambda: None)
    for number in range(arena.max_bytes):
        store(values, f"{number}", 1)
    return values


def pin(values: StoredValues, key: str) -> PinnedValue:
    pinned = values.lookup(key, None)
    assert pinned is not None
    return pinned


def keys_in(values: StoredValues) -> str:
    return "".join(key for key in "abcdefgh" if values.has([key], None)[0])


class ArenaInPieces(HeapArena):
    """One that has free bytes, but not in one piece, while anything is charged."""

    def allocate(self, sizes: Sequence[int], charged: int = 0) -> list[Region] | None:
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

    def allocate(self, sizes: Sequence[int], charged: int = 0) -> list[Region] | None:
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


def test_a_second_release_does_nothing(values: StoredValues) -> None:
    store(values, "a", 10)
    once, other = pin(values, "a"), pin(values, "a")
    values.release(once)
    values.release(once)
    assert values.reserve_nowait("b", spec_of(100), None) is None
    values.release(other)
    assert keys_in(values) == "a"
    store(values, "b", 100)


def test_a_discarded_put_leaves_no_trace(values: StoredValues) -> None:
    pending = reserve(values, "a", 100)
    values.discard(pending)
    values.discard(pending)
    store(values, "b", 100)


def test_a_put_is_committed_once(values: StoredValues) -> None:
    pending = reserve(values, "a", 1)
    values.commit(pending, b"")
    values.discard(pending)
    with pytest.raises(RuntimeError, match="before"):
        values.commit(pending, b"")
    assert keys_in(values) == "a"


def test_the_number_of_keys_is_bounded_too() -> None:
    values = make_values(max_keys=2)
    for key in "abc":
        store(values, key, 0)
    assert keys_in(values) == "bc"


def test_while_all_keys_are_in_use_there_is_no_room_for_another_one() -> None:
    values = make_values(max_keys=1)
    store(values, "a", 0)
    pinned = pin(values, "a")
    assert values.reserve_nowait("b", spec_of(0), None) is None
    store(values, "a", 0)
    values.release(pinned)
    store(values, "b", 0)
    assert keys_in(values) == "b"


async def test_who_waits_as_all_keys_are_in_use_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    values = make_values(max_keys=2)  # of one owner
    store(values, "a", 0)
    store(values, "b", 0)
    pinned = [pin(values, "a"), pin(values, "b")]
    waiting = asyncio.create_task(values.reserve("c", spec_of(0), None))
    await until_blocked(waiting)
    assert "one of 2 keys, all of them in use or pinned" in caplog.text
    values.release_all(pinned)
    values.discard(await waiting)
    await values.room.aclose()


def test_who_has_room_already_may_exceed_the_number_of_keys() -> None:
    values = make_values(max_keys=1)
    pending = reserve(values, "b", 0)
    store(values, "a", 0)
    pin(values, "a")
    values.commit(pending, b"")
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

    @rule()
    def clear(self) -> None:
        assert self.stored.clear(None) == len(self.values)
        self.values.clear()

    @invariant()
    def they_agree(self) -> None:
        assert keys_in(self.stored) == "".join(sorted(self.values))
        assert self.arena.used_bytes == self.used_bytes() <= _MAX_BYTES


ValuesAsADict.TestCase.settings = settings(max_examples=60, deadline=None)

test_it_behaves_as_a_dict_with_an_order = ValuesAsADict.TestCase


def fill(values: StoredValues, count: int) -> None:
    """Store values, more than are swept at once, and clear them."""
    for number in range(count):
        store(values, f"{number}", 1 if number < _MAX_BYTES else 0)
    assert values.clear(None) == count


async def test_what_was_cleared_makes_room_before_its_turn_has_come() -> None:
    values = make_values(1000)
    fill(values, 700)
    assert len(values) == 0
    store(values, "a", _MAX_BYTES)
    assert keys_in(values) == "a" and not values.counters.evictions
    for _ in range(4):
        await asyncio.sleep(0)
    assert keys_in(values) == "a"
    assert values.clear(None) == 1


async def test_cleared_values_are_let_go_of_in_turns() -> None:
    arena = HeapArena(_MAX_BYTES)
    values = StoredValues(arena, lambda: None, 1000)
    fill(values, 700)
    store(values, "a", 0)
    assert values.clear(None) == 1 and arena.used_bytes == _MAX_BYTES
    for _ in range(4):
        await asyncio.sleep(0)
    assert arena.used_bytes == 0


async def test_at_the_end_all_values_are_let_go_of_in_turns() -> None:
    arena = HeapArena(1000)
    values = full_of(arena)
    values.close()
    assert len(values) == 0 and arena.used_bytes == 1000 - 256
    await asyncio.sleep(0)
    assert 0 < arena.used_bytes < 1000 - 256
    await values.aclose()
    assert arena.used_bytes == 0


async def test_many_values_that_were_held_are_let_go_of_in_turns() -> None:
    arena = HeapArena(1000)
    values = full_of(arena)
    held = values.hold([f"{number}" for number in range(1000)], None)
    values.close()
    await values.aclose()
    values.release_all(held)
    assert arena.used_bytes == 1000 - 256
    await asyncio.sleep(0)
    assert 0 < arena.used_bytes < 1000 - 256
    for _ in range(2):
        await asyncio.sleep(0)
    assert arena.used_bytes == 0


async def test_the_end_waits_for_what_is_still_let_go_of() -> None:
    arena = HeapArena(1000)
    values = full_of(arena)
    values.release_all(values.hold([f"{number}" for number in range(1000)], None))
    values.close()
    await values.aclose()
    assert arena.used_bytes == 0


def test_where_no_loop_runs_all_values_are_let_go_of_at_once() -> None:
    arena = HeapArena(1000)
    values = full_of(arena)
    held = values.hold([f"{number}" for number in range(500)], None)
    values.close()
    assert arena.used_bytes == 500
    values.release_all(held)
    assert arena.used_bytes == 0


async def test_one_owner_s_values_are_cleared_and_no_other_s(
    values: StoredValues,
) -> None:
    store(values, "a", 10)
    other = KVFingerprint("other")
    assert values.clear(other) == 0 and keys_in(values) == "a"
    assert values.clear(None) == 1 and keys_in(values) == ""


async def test_who_is_below_is_told_of_each_change_and_of_each_use(
    values: StoredValues,
) -> None:
    values.lower = below = RecordingTiers()
    store(values, "a", 10)
    pin(values, "a")
    assert values.remove("a", None)
    store(values, "b", 10)
    assert values.clear(None) == 1 and values.clear(KVFingerprint("m")) == 0
    a, b = ("a", None), ("b", None)
    assert below.told == [
        *(("stored", a), ("used", a), ("deleted", a), ("stored", b)),
        *(("cleared", None), ("cleared", KVFingerprint("m"))),
    ]


def _spec(nbytes: int) -> TensorSpec:
    return TensorSpec((nbytes,), "uint8")


class Store:
    """Values of 100 bytes, all of which a put has taken."""

    def __init__(self) -> None:
        self.values = StoredValues(HeapArena(100), lambda: None)
        pending = self.reserve_nowait(100)
        assert pending is not None
        self.taken = pending

    def reserve_nowait(self, nbytes: int) -> PendingPut | None:
        return self.values.reserve_nowait("key", _spec(nbytes), None)

    def reserve(self, nbytes: int) -> asyncio.Task[PendingPut]:
        reserving = self.values.reserve("key", _spec(nbytes), None)
        return asyncio.create_task(reserving)


@pytest.fixture
async def taken() -> Store:
    return Store()


async def test_room_is_given_in_the_order_of_the_calls(taken: Store) -> None:
    tasks = [taken.reserve(nbytes) for nbytes in (90, 20, 5)]
    await until_blocked(*tasks)
    taken.values.discard(taken.taken)
    first = await tasks[0]
    assert not tasks[2].done()
    taken.values.discard(first)
    for task in tasks[1:]:
        taken.values.discard(await task)
    assert taken.values.counters.room_waits == 3


async def test_nobody_overtakes_the_line(taken: Store) -> None:
    waiting = taken.reserve(10)
    await until_blocked(waiting)
    assert taken.reserve_nowait(0) is None
    now_s = asyncio.get_running_loop().time()
    assert 2.0 < taken.values.room.longest_wait_s(now_s + 3.0) < 4.0
    taken.values.discard(taken.taken)
    taken.values.discard(await waiting)
    assert taken.values.room.longest_wait_s(now_s) == 0.0


async def test_who_is_cancelled_lets_the_next_go_on(taken: Store) -> None:
    taken.values.discard(taken.taken)
    half = taken.reserve_nowait(50)
    tasks = [taken.reserve(80), taken.reserve(50)]
    await until_blocked(*tasks)
    tasks[0].cancel()
    pending = await tasks[1]
    assert half is not None
    for put in (half, pending):
        taken.values.discard(put)
    assert len(taken.values.room) == 0


async def test_what_a_put_got_as_it_was_cancelled_is_free_again(taken: Store) -> None:
    waiting = taken.reserve(100)
    await until_blocked(waiting)
    taken.values.discard(taken.taken)
    await cancelled(waiting)
    assert waiting.cancelled()
    assert taken.reserve_nowait(100) is not None


async def test_a_wait_ends_with_the_ledger(taken: Store) -> None:
    waiting = taken.reserve(10)
    await until_blocked(waiting)
    taken.values.close()
    with pytest.raises(BufferClosed):
        await waiting
    await taken.values.room.aclose()
    assert len(taken.values.room) == 0


def put(values: StoredValues, nbytes: int) -> asyncio.Task[PendingPut]:
    return asyncio.create_task(values.reserve("put", spec_of(nbytes), None))


async def test_others_have_their_turn_while_many_values_make_room_for_one() -> None:
    values = full_of(HeapArena(1000))
    large, counts = put(values, 1000), [1000]
    while not large.done():
        await asyncio.sleep(0)
        counts.append(len(values))
    assert counts[-1] == 0
    assert max(a - b for a, b in itertools.pairwise(counts)) <= 256
    assert values.counters.room_waits == 0
    await values.room.aclose()


async def test_who_comes_while_many_values_make_room_for_one_waits_behind_it() -> None:
    values = full_of(HeapArena(1000))
    puts = [put(values, nbytes) for nbytes in (900, *[5] * 20)]
    await asyncio.sleep(0)
    assert 1000 - 256 <= len(values) < 1000
    assert values.reserve_nowait("other", spec_of(0), None) is None
    for each in puts:
        await each
        assert all(one.done() for one in puts[: puts.index(each)])
    assert len(values) == 0
    await values.room.aclose()


async def test_who_is_cancelled_as_many_values_make_room_lets_the_next_go_on() -> None:
    values = full_of(HeapArena(1000))
    large, other = put(values, 1000), put(values, 500)
    await asyncio.sleep(0)
    await cancelled(large)
    assert large.cancelled()
    values.discard(await other)
    assert values.reserve_nowait("other", spec_of(500), None) is not None
    await values.room.aclose()


async def test_many_values_make_no_room_for_one_that_waits_as_the_end_comes() -> None:
    values = full_of(HeapArena(1000))
    large = put(values, 1000)
    await asyncio.sleep(0)
    values.close()
    with pytest.raises(BufferClosed):
        await large
    await values.room.aclose()


SPEC = TensorSpec((60,), "uint8")

OTHER = KVFingerprint.of("other")


async def stored(*fingerprints: KVFingerprint | None) -> StoredValues:
    values = StoredValues(HeapArena(100), lambda: None)
    for fingerprint in fingerprints:
        values.commit(await values.reserve("a", SPEC, fingerprint), b"digest")
    return values


async def test_a_value_belongs_to_the_fingerprint_of_who_put_it() -> None:
    values = await stored(OTHER)
    assert values.has(["a", "b"], OTHER) == (True, False)
    assert values.has(["a"], None) == (False,)
    assert values.lookup("a", None) is None and not values.remove("a", None)
    assert values.remove("a", OTHER) and values.has(["a"], OTHER) == (False,)


async def test_a_value_that_is_held_is_not_dropped_for_room() -> None:
    values = await stored(None)
    (held,) = values.hold(["a"], None)
    assert held is not None and held.digest == b"digest"
    assert values.reserve_nowait("b", SPEC, None) is None
    values.release(held)
    pending = values.reserve_nowait("b", SPEC, None)
    assert pending is not None and values.has(["a"], None) == (False,)
    values.discard(pending)


async def test_what_can_never_fit_is_refused_at_once() -> None:
    with pytest.raises(EntryTooLarge, match="101 bytes can never fit in 100"):
        await (await stored()).reserve("a", TensorSpec((101,), "uint8"), None)


async def test_once_it_is_closed_every_call_says_so() -> None:
    values = await stored(None)
    values.close()
    for call in (
        lambda: values.check_usable("a"),
        lambda: values.lookup("a", None),
        lambda: values.hold(["a"], None),
        lambda: values.remove("a", None),
        lambda: values.has(["a"], None),
        lambda: values.reserve_nowait("a", SPEC, None),
    ):
        with pytest.raises(BufferClosed):
            call()


async def test_what_is_no_key_is_refused() -> None:
    with pytest.raises(TypeError):
        (await stored()).check_usable(7)  # type: ignore[arg-type]


def test_what_is_pinned_makes_room_for_its_successor(
    values: StoredValues,
) -> None:
    values.commit(reserve(values, "a", 60), b"", is_pinned=True)
    assert values.reserve_nowait("b", spec_of(60), None) is None
    held = pin(values, "a")
    assert values.reserve_nowait("a", spec_of(60), None) is None
    values.release(held)
    values.commit(reserve(values, "a", 100), b"new", is_pinned=True)
    assert pin(values, "a").digest == b"new"


def test_a_pinned_value_in_a_full_arena_of_pieces_goes_for_its_successor() -> None:
    values = StoredValues(ArenaInPieces(_MAX_BYTES), lambda: None)
    values.commit(reserve(values, "a", 10), b"", is_pinned=True)
    values.commit(reserve(values, "a", 20), b"new", is_pinned=True)
    assert pin(values, "a").digest == b"new"


def test_what_has_expired_is_gone_and_counted(values: StoredValues) -> None:
    values.commit(reserve(values, "a", 10), b"", expires_at_s=1.0)
    assert not values.has_name(("a", None))
    assert (values.counters.expired, len(values)) == (1, 0)


def test_what_has_expired_is_a_miss(values: StoredValues) -> None:
    values.commit(reserve(values, "a", 10), b"", expires_at_s=1.0)
    assert values.lookup("a", None) is None
    assert (values.counters.expired, values.counters.misses) == (1, 1)
