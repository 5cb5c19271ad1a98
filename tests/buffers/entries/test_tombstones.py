from __future__ import annotations

from asynckv.buffers.entries.table import Tombstone, Tombstones


def stone(left_at: float, reason: str = "") -> Tombstone:
    return Tombstone(reason, b"", (), left_at)


def test_the_oldest_are_forgotten_by_count() -> None:
    stones = Tombstones(max_count=2)
    for number in range(3):
        stones.add(str(number), stone(0))
    assert len(stones) == 2
    assert stones.find("0", 0) is None
    assert stones.find("2", 0) is not None


def test_and_by_bytes_however_many_took_an_entry() -> None:
    one = Tombstone("", b"", (bytes(16),) * 9, 0, consumers=frozenset(("name" * 9,)))
    assert 512 + 9 * (16 + 33) < one.nbytes < 2048
    stones = Tombstones(max_bytes=3 * one.nbytes)
    for number in range(5):
        stones.add(str(number), one)
        stones.add(str(number), one)
    assert (len(stones), stones.nbytes) == (3, 3 * one.nbytes)
    assert stones.find("0", 601) is None
    assert (len(stones), stones.nbytes) == (0, 0)


def test_one_that_is_larger_than_all_may_be_is_not_remembered() -> None:
    stones = Tombstones(max_bytes=100)
    stones.add("a", stone(0))
    assert (len(stones), stones.nbytes) == (0, 0)


def test_and_by_age() -> None:
    stones = Tombstones(max_age_s=10)
    stones.add("old", stone(0))
    stones.add("new", stone(5))
    assert stones.find("old", 10) is not None
    assert stones.find("old", 11) is None
    assert stones.find("new", 11) is not None


def test_an_id_that_leaves_again_is_the_newest() -> None:
    stones = Tombstones(max_count=2)
    for name in ("a", "b", "a", "c"):
        stones.add(name, stone(0, name))
    assert stones.find("a", 0) is not None
    assert stones.find("b", 0) is None
