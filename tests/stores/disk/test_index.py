"""What is known of a disk: which slot has which key, who reads it, who goes next."""

from __future__ import annotations

import time

import numpy
import pytest

from asynckv.stores.disk.index import SlotIndex, place_of
from asynckv.stores.disk.segments import SLOT_BITS, Segment
from asynckv.stores.disk.slots import FoundSlots, hash_of

PAGES = 2


@pytest.fixture
def index() -> SlotIndex:
    """Four slots of two pages, free."""
    index = SlotIndex()
    index.add_segment(Segment(0, PAGES, 4), is_free=True)
    index.end_scan()
    return index


def put(index: SlotIndex, *keys: str, expires_at_s: float | None = None) -> list[int]:
    slots = []
    for key in keys:
        slot = index.take(PAGES)
        assert slot is not None
        assert (
            index.put(key, slot, sequence=10 + slot, expires_at_s=expires_at_s) is None
        )
        slots.append(slot)
    return slots


def keys_of(index: SlotIndex, keys: str = "abcdefgh") -> str:
    found = index.find(list(keys))
    return "".join(key for key, slot in zip(keys, found, strict=True) if slot >= 0)


def found_rows(*rows: tuple[int, str, int]) -> FoundSlots:
    """Rows of a slot, a key and a sequence."""
    never = float("inf")
    return FoundSlots.of([(at, *hash_of(key), turn, never) for at, key, turn in rows])


def test_slots_are_taken_in_their_order_until_none_is_free(index: SlotIndex) -> None:
    assert put(index, *"abcd") == [0, 1, 2, 3]
    assert index.take(PAGES) is None
    assert index.take(PAGES + 1) is None
    assert keys_of(index) == "abcd" and len(index) == 4


def test_the_least_recently_used_goes_first(index: SlotIndex) -> None:
    put(index, *"abcd")
    index.use(index.find(["a", "x"]))
    assert index.evict(PAGES) == 1
    index.put("e", 1, 20, None)
    index.use(index.find(["c"]))
    assert [index.evict(PAGES) for _ in range(5)] == [3, 0, 1, 2, None]
    assert index.evictions == 5


def test_what_is_new_goes_last(index: SlotIndex) -> None:
    put(index, *"abcd")
    for number, key in enumerate("efgh"):
        slot = index.evict(PAGES)
        assert slot == number
        index.put(key, slot, 30 + number, None)
    assert keys_of(index) == "efgh"


def test_what_is_read_does_not_go(index: SlotIndex) -> None:
    slots = put(index, *"abcd")
    for slot in slots:
        index.begin_read(slot)
    assert index.evict(PAGES) is None
    index.end_read(2)
    assert index.evict(PAGES) == 2


def test_a_slot_that_is_read_is_free_when_nobody_reads_it(index: SlotIndex) -> None:
    put(index, *"abcd")
    index.begin_read(1)
    index.begin_read(1)
    assert index.remove("b") == 1
    index.free(1)
    index.end_read(1)
    assert index.take(PAGES) is None
    index.end_read(1)
    assert index.take(PAGES) == 1


def test_a_slot_is_not_free_before_it_was_overwritten(index: SlotIndex) -> None:
    put(index, *"abcd")
    assert index.remove("a") == 0 and index.remove("a") is None
    assert index.take(PAGES) is None
    index.free(0)
    assert index.take(PAGES) == 0


def test_a_lost_slot_is_nobodys(index: SlotIndex) -> None:
    put(index, *"abc")
    slot = index.take(PAGES)
    assert slot == 3
    index.begin_write("d", slot)
    index.lose(slot)
    assert index.take(PAGES) is None and index.lost == 1
    assert not index.retake_lost("a")
    assert index.retake_lost("d") == [slot] and index.lost == 0
    index.lose(slot)
    assert index.retake_lost() == [slot]
    index.lose(slot)
    assert [index.evict(PAGES) for _ in range(4)] == [0, 1, 2, None]


def test_the_later_of_two_values_stays_whichever_is_written_first(
    index: SlotIndex,
) -> None:
    first, second, third = (index.take(PAGES) for _ in range(3))
    assert first is not None and second is not None and third is not None
    assert index.put("a", second, 2, None) is None
    assert index.put("a", first, 1, None) == first
    assert index.put("a", third, 3, None) == second
    assert index.find(["a"]) == [third]


def test_a_value_is_missing_from_when_it_is_void(index: SlotIndex) -> None:
    put(index, "a", expires_at_s=time.time() - 5)
    put(index, "b", expires_at_s=time.time() + 60)
    put(index, "c", expires_at_s=float("inf"))
    assert keys_of(index) == "bc"


def test_a_key_is_removed_from_a_slot_it_is_in_alone(index: SlotIndex) -> None:
    put(index, *"ab")
    assert index.remove("a", slot=1) is None
    assert keys_of(index) == "ab"
    assert index.remove("a", slot=0) == 0


@pytest.fixture
def unknown() -> SlotIndex:
    """Eight slots that nobody has looked at."""
    index = SlotIndex()
    index.add_segment(Segment(0, PAGES, 8), is_free=False)
    return index


def test_slots_are_used_as_they_are_looked_at(unknown: SlotIndex) -> None:
    assert unknown.take(PAGES) is None
    assert not unknown.add_found(0, range(4), found_rows((1, "a", 5)), [2])
    assert [unknown.take(PAGES) for _ in range(3)] == [0, 3, None]
    assert keys_of(unknown) == "a" and unknown.unread == 1


def test_of_values_of_one_key_the_newest_is_found(unknown: SlotIndex) -> None:
    rows = found_rows((0, "a", 5), (1, "a", 7), (2, "a", 6), (3, "b", 1))
    old = unknown.add_found(0, range(4), rows, [])
    old += unknown.add_found(0, range(4, 8), found_rows((6, "b", 2), (5, "a", 3)), [])
    assert sorted(old) == [0, 2, 3, 5]
    assert unknown.find(["a", "b"]) == [1, 6] and len(unknown) == 2


def test_what_was_deleted_meanwhile_is_not_found(unknown: SlotIndex) -> None:
    unknown.add_found(0, range(4), found_rows(), [])
    unknown.remove("a")
    put(unknown, "a")
    unknown.remove("b")
    rows = found_rows((4, "a", 5), (5, "b", 6), (6, "c", 7))
    assert sorted(unknown.add_found(0, range(4, 8), rows, [])) == [4, 5]
    assert unknown.find(["a", "b", "c"]) == [0, -1, 6]


def test_after_a_scan_the_oldest_value_goes_first(unknown: SlotIndex) -> None:
    rows = found_rows(*((at, key, (at + 4) % 8) for at, key in enumerate("abcdefgh")))
    unknown.add_found(0, range(8), rows, [])
    assert unknown.end_scan() == 7
    assert [unknown.evict(PAGES) for _ in range(5)] == [4, 5, 6, 7, 0]


def test_a_file_that_is_colder_than_all_of_another_size_is_given_up(
    index: SlotIndex,
) -> None:
    index.add_segment(Segment(1, 5, 2), is_free=True)
    put(index, *"abcd")
    for number in range(9):
        slot = index.take(5)
        slot = index.evict(5) if slot is None else slot
        assert slot is not None
        index.put(f"large {number}", slot, 50 + number, None)
    cold = index.coldest_segment(5, is_needed=False)
    assert cold is index.segments[0]
    assert index.coldest_segment(PAGES, is_needed=False) is None


def test_a_file_in_use_is_not_given_up(index: SlotIndex) -> None:
    put(index, *"ab")
    index.begin_read(1)
    assert index.coldest_segment(9, is_needed=True) is None
    index.end_read(1)
    assert index.coldest_segment(9, is_needed=True) is index.segments[0]
    index.take(PAGES)
    assert index.coldest_segment(9, is_needed=True) is None


def test_while_a_file_is_given_up_nothing_is_found_there(index: SlotIndex) -> None:
    put(index, "a", "b", expires_at_s=time.time() + 60)
    leaving = index.forget_segment(index.segments[0])
    next(leaving)
    assert keys_of(index) == ""
    assert index.remove("a") is None and index.take(PAGES) is None
    assert list(leaving) == []
    assert not index.segments and not len(index)


def test_a_value_may_replace_one_that_goes_with_its_file(index: SlotIndex) -> None:
    put(index, "a")
    index.add_segment(Segment(1, PAGES, 2), is_free=True)
    leaving = index.forget_segment(index.segments[0])
    index.segments[0].is_leaving = True
    slot = index.take(PAGES)
    assert slot is not None and place_of(slot) == (1, 0)
    assert index.put("a", slot, 99, None) is None
    assert list(leaving) == [None]
    assert index.find(["a"]) == [1 << SLOT_BITS]


def test_two_million_slots_take_less_than_200_bytes_each() -> None:
    count, each = 2_000_000, 250_000
    index, most = SlotIndex(lambda work: None), 0
    rng = numpy.random.default_rng(1)
    for number in range(count // each):
        index.add_segment(Segment(number, PAGES, each), is_free=False)
        low, high = rng.integers(0, 2**63, (2, each), numpy.uint64)
        slots, never = numpy.arange(each), numpy.full(each, numpy.inf)
        rows = FoundSlots(slots, low, high, slots.astype(numpy.uint64), never)
        index.add_found(number, range(each), rows, [])
        most = max(most, index.nbytes // len(index))
    assert len(index) == count and index.nbytes / count < 150
    assert most < 200
