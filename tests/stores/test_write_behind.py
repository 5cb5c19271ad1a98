"""Whatever comes of changes, in whatever order: nothing older is taken for valid."""

from __future__ import annotations

import collections
import tracemalloc
from typing import TypeAlias

import pytest
from hypothesis import given, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from asynckv.abc import TierResult
from asynckv.stores.clearings import TierClearing
from asynckv.stores.write_behind import TierChange, WriteBehind

Value: TypeAlias = tuple[int, str]
"""What it was called by its writer: its epoch, and its bytes."""
KEYS = ("p/a", "p/b", "q/c")
PREFIXES = ("p/", "q/")


class AnyTier(RuleBasedStateMachine):
    """A tier that does late, or not at all, or says nothing of what it did."""

    DELETES_OLD = False

    def __init__(self) -> None:
        super().__init__()
        self.released: collections.Counter[Value] = collections.Counter()
        self.behind: WriteBehind[Value] = WriteBehind(
            30, self._release, deletes_old=self.DELETES_OLD, max_keys=2
        )
        self.epoch = 0
        self.newest: dict[str, Value | None] = {}
        self.tier: dict[str, Value] = {}
        self.by_others: set[int] = set()
        self.running: list[TierChange[Value]] = []
        self.unanswered: list[tuple[str, Value]] = []
        self.given: list[Value] = []
        self.last_accepted: dict[str, int] = {}
        self.cleared: dict[str, int] = {}
        self.clearing: list[TierClearing] = []
        self.was_always_cleared = True

    def _release(self, value: Value) -> None:
        self.released[value] += 1

    @rule(key=st.sampled_from(KEYS), what=st.sampled_from("xy"), n=st.integers(0, 20))
    def put(self, key: str, what: str, n: int) -> None:
        self.epoch += 1
        value = (self.epoch, what)
        self.newest[key] = value
        self.given.append(value)
        self.behind.write(key, self.epoch, value, n, what)

    @rule(key=st.sampled_from(KEYS))
    def delete(self, key: str) -> None:
        self.epoch += 1
        self.newest[key] = None
        self.behind.delete(key, self.epoch)

    @rule(key=st.sampled_from(KEYS))
    def skip(self, key: str) -> None:
        self.epoch += 1
        self.newest[key] = (self.epoch, "y")
        self.behind.skip(key, self.epoch, "y")

    @rule(most=st.integers(1, 3))
    def drop_writes(self, most: int) -> None:
        self.behind.drop_writes(most)

    @rule(key=st.sampled_from(KEYS))
    def another_process_puts(self, key: str) -> None:
        self.epoch += 1
        self.by_others.add(self.epoch)
        self.tier[key] = (self.epoch, "z")

    @rule(most=st.integers(1, 3))
    def begin(self, most: int) -> None:
        self.running += self.behind.take(most, 20)

    @rule(data=st.data(), happens=st.booleans(), is_known=st.booleans())
    def end(self, data: st.DataObject, happens: bool, is_known: bool) -> None:
        if not self.running:
            return
        change = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        if happens and change.value is not None:
            self.tier[change.key] = change.value
        elif happens:
            self.tier.pop(change.key, None)
        elif change.value is not None and not self.DELETES_OLD:
            self.unanswered.append((change.key, change.value))
        self.behind.ended(change, is_done=happens and is_known)

    @rule(data=st.data())
    def be_late(self, data: st.DataObject) -> None:
        if self.running:
            data.draw(st.sampled_from(self.running)).is_late = True

    @rule(data=st.data())
    def a_write_that_was_not_answered_arrives(self, data: st.DataObject) -> None:
        if self.unanswered:
            index = data.draw(st.integers(0, len(self.unanswered) - 1))
            key, value = self.unanswered.pop(index)
            self.tier[key] = value

    @rule()
    def retry(self) -> None:
        self.behind.retry()
        self._retry_clearings()

    def _retry_clearings(self) -> None:
        for prefix in PREFIXES:
            self.behind.clearings.retry(prefix)

    @rule(prefix=st.sampled_from(PREFIXES))
    def clear(self, prefix: str) -> None:
        self.epoch += 1
        self.cleared[prefix] = self.epoch
        self.newest.update({key: None for key in KEYS if key.startswith(prefix)})
        self.behind.clearings.clear(prefix, self.epoch)

    @rule()
    def let_go_of_what_was_cleared(self) -> None:
        self.behind.forget_cleared()

    @rule()
    def begin_clearing(self) -> None:
        clearing = self.behind.take_clearing()
        if clearing is not None:
            self.clearing.append(clearing)

    @rule(data=st.data(), happens=st.booleans())
    def end_clearing(self, data: st.DataObject, happens: bool) -> None:
        if not self.clearing:
            return
        index = data.draw(st.integers(0, len(self.clearing) - 1))
        clearing = self.clearing.pop(index)
        results = (TierResult.FAILED, TierResult.REFUSED)
        result = data.draw(st.sampled_from(results))
        if happens:
            self._clear_tier(clearing)
            result = TierResult.DONE
        self.was_always_cleared &= happens
        self.behind.clearings.ended(clearing, result)

    def _clear_tier(self, clearing: TierClearing) -> None:
        for key in KEYS:
            if key.startswith(clearing.prefix):
                self.tier.pop(key, None)

    @invariant()
    def what_is_valid_is_the_last_that_was_put_or_of_somebody_else(self) -> None:
        for key, (epoch, what) in self.tier.items():
            if key in self.newest and epoch not in self.by_others:
                newest = self.newest[key]
                is_right = newest is not None and newest[1] == what
                assert is_right or not self.behind.valid_from(key).has(epoch, what)

    @invariant()
    def of_what_was_cleared_nothing_is_valid_whoever_put_it(self) -> None:
        for key, (epoch, what) in self.tier.items():
            newest = self.newest.get(key)
            if epoch < self.cleared.get(key[:2], 0) and (newest or (0, ""))[1] != what:
                assert not self.behind.valid_from(key).has(epoch, what)

    @invariant()
    def while_a_prefix_is_cleared_only_what_is_late_is_under_way_of_it(
        self,
    ) -> None:
        clearing = [one.prefix for one in self.clearing]
        assert len(set(clearing)) == len(clearing)
        waited_for = [change for change in self.running if not change.is_late]
        assert not any(change.key[:2] in clearing for change in waited_for)

    @invariant()
    def it_knows_of_no_more_keys_than_are_under_way_and_its_bound(self) -> None:
        assert self.behind.known_keys <= 2 + len(self.running)

    @invariant()
    def of_a_key_one_change_is_under_way(self) -> None:
        keys = [change.key for change in self.running]
        assert len(set(keys)) == len(keys)

    def teardown(self) -> None:
        """In the end all goes well: then nothing is kept, and each value let go."""
        for _ in range(100):
            while self.behind.forget_cleared():
                pass
            clearing = self.behind.take_clearing()
            for one in (*self.clearing, *([] if clearing is None else [clearing])):
                self._clear_tier(one)
                self.behind.clearings.ended(one, TierResult.DONE)
            self.clearing.clear()
            self._retry_clearings()
            self.running += self.behind.take(3, 20)
            for change in self.running:
                if change.value is not None:
                    self.tier[change.key] = change.value
                else:
                    self.tier.pop(change.key, None)
                self.behind.ended(change, is_done=True)
            self.running.clear()
            self.behind.retry()
        assert len(self.behind) == 0
        assert self.behind.nbytes == 0
        assert self.released == collections.Counter(self.given)
        self.what_is_valid_is_the_last_that_was_put_or_of_somebody_else()
        if self.DELETES_OLD and self.was_always_cleared:
            assert self.behind.known_keys == 0


class TierOfOurOwn(AnyTier):
    """Nobody else writes there: what could not be written is deleted there."""

    DELETES_OLD = True


TestAnyTier = AnyTier.TestCase
TestTierOfOurOwn = TierOfOurOwn.TestCase


def behind(**options: bool) -> WriteBehind[str]:
    return WriteBehind(10, lambda value: None, **options)


def test_what_has_no_room_is_dropped_and_counted() -> None:
    tier = behind()
    assert tier.write("a", 1, "v", 8, "v")
    assert not tier.write("b", 2, "v", 8, "v")
    assert tier.dropped == 1


def test_a_value_larger_than_the_bound_goes_alone() -> None:
    tier = behind()
    assert tier.write("a", 1, "v", 80, "v")


def test_a_newer_value_takes_the_place_of_one_that_waits() -> None:
    tier = behind()
    tier.write("a", 1, "old", 8, "old")
    tier.write("a", 2, "new", 8, "new")
    assert [change.value for change in tier.take(9, 99)] == ["new"]


def test_deletes_and_writes_are_not_begun_together() -> None:
    tier = behind()
    tier.delete("a", 1)
    tier.write("b", 2, "v", 1, "v")
    tier.delete("c", 3)
    assert [change.key for change in tier.take(9, 99)] == ["a", "c"]
    assert [change.key for change in tier.take(9, 99)] == ["b"]


def test_a_key_whose_delete_fails_is_hidden_until_it_is_deleted() -> None:
    tier = behind()
    tier.delete("a", 5)
    (change,) = tier.take(9, 99)
    tier.ended(change, is_done=False)
    assert not tier.is_sure("a")
    assert not tier.valid_from("a").has(4, "v")
    tier.retry()
    (change,) = tier.take(9, 99)
    tier.ended(change, is_done=True)
    assert tier.is_sure("a")


def test_equal_bytes_are_valid_though_their_last_write_failed() -> None:
    tier = behind()
    tier.write("a", 5, "v", 1, "v")
    (change,) = tier.take(9, 99)
    tier.ended(change, is_done=False)
    assert tier.valid_from("a").has(4, "v")
    assert not tier.valid_from("a").has(4, "w")


def test_nobody_waits_for_a_call_that_may_never_end() -> None:
    tier = behind()
    tier.write("a", 1, "v", 1, "v")
    (change,) = tier.take(9, 99)
    assert tier.is_behind(1)
    change.is_late = True
    tier.write("a", 2, "w", 1, "w")
    assert not tier.is_behind(2)
    tier.write("b", 3, "v", 1, "v")
    assert tier.is_behind(3) and not tier.is_behind(2)


def test_keys_whose_calls_do_not_end_keep_no_others_waiting() -> None:
    tier: WriteBehind[str] = WriteBehind(1000, lambda value: None)
    for epoch in range(2):
        for number in range(100):
            tier.write(f"{number}", 100 * epoch + number, "v", 1, "v")
        if not epoch:
            assert len(tier.take(100, 1000)) == 100
    tier.write("other", 200, "v", 1, "v")
    assert [change.key for change in tier.take(9, 99)] == ["other"]


def test_what_waits_is_dropped_by_a_close_and_what_is_under_way_ends() -> None:
    tier = behind()
    tier.write("a", 1, "v", 4, "v")
    (change,) = tier.take(9, 99)
    tier.write("b", 2, "v", 4, "v")
    for _ in tier.close():
        tier.ended(change, is_done=True)
    assert (len(tier), tier.nbytes, tier.accepted, tier.dropped) == (0, 0, 1, 1)


def test_by_a_close_what_waits_is_dropped_step_by_step() -> None:
    tier: WriteBehind[str] = WriteBehind(1000, lambda value: None)
    for number in range(600):
        tier.write(f"{number}", number, "v", 1, "v")
    assert [len(tier) for _ in tier.close()] == [600 - 256, 600 - 512, 0]


@pytest.mark.parametrize("deletes_old", [False, True])
@given(count=st.integers(1, 40))
def test_what_is_forgotten_makes_all_that_is_older_void(
    deletes_old: bool, count: int
) -> None:
    tier: WriteBehind[str] = WriteBehind(
        0, lambda value: None, deletes_old=deletes_old, max_keys=8
    )
    tier.write("first", 1, "v", 1, "v")  # alone it is let in
    for number in range(count):
        tier.write(f"k{number}", 2 + number, "v", 1, "v")
    for number in range(count):
        assert not tier.valid_from(f"k{number}").has(1, "w")


def test_an_old_value_that_arrives_after_its_successor_was_dropped_is_void() -> None:
    tier = behind()
    tier.write("a", 1, "old", 8, "old")
    (change,) = tier.take(9, 99)
    tier.write("a", 2, "new", 8, "new")
    tier.ended(change, is_done=True)
    assert not tier.valid_from("a").has(1, "old")
    assert tier.valid_from("a").has(1, "new")


def test_what_was_not_answered_is_void_though_it_arrives_after_a_later_one() -> None:
    tier = behind()
    for epoch, is_done in ((1, False), (2, True)):
        tier.write("a", epoch, f"value {epoch}", 1, f"value {epoch}")
        (change,) = tier.take(9, 99)
        tier.ended(change, is_done=is_done)
    assert not tier.valid_from("a").has(1, "value 1")
    assert tier.valid_from("a").has(2, "value 2") and tier.may_be_new("a")
    tier.delete("a", 3)
    (change,) = tier.take(9, 99)
    tier.ended(change, is_done=True)
    assert not any(tier.valid_from("a").has(n, f"value {n}") for n in (1, 2))
    assert not tier.may_be_new("a")


def test_keys_in_doubt_are_bounded_and_nothing_is_deleted_for_them() -> None:
    tier = WriteBehind[str](1000, lambda value: None, max_keys=4)
    for number in range(20):
        for is_done in (False, True):
            tier.write(f"{number}", 2 * number + is_done + 1, "v", 1, f"{number}")
            for change in tier.take(9, 99):
                tier.ended(change, is_done=is_done)
    assert tier.known_keys <= 4 and not len(tier)
    assert not tier.valid_from("0").has(1, "late")


def test_of_keys_that_are_never_written_nothing_is_deleted_that_others_put() -> None:
    tier = WriteBehind[str](1000, lambda value: None, max_keys=4)
    for number in range(1000):
        tier.note(f"{number}", 2 + number, "v")
    assert not len(tier)
    assert not any(tier.valid_from(f"{number}").has(1, "w") for number in range(1000))
    others = [tier.valid_from(f"other {number}").has(1, "w") for number in range(1000)]
    assert others.count(True) > 900


def test_of_many_writes_some_are_dropped_at_a_time() -> None:
    tier = WriteBehind[str](1000, lambda value: None)
    for number in range(300):
        tier.write(f"{number}", 1 + number, "v", 1, "v")
    assert tier.drop_writes() and (len(tier), tier.dropped) == (44, 256)
    assert not tier.drop_writes() and (len(tier), tier.dropped) == (0, 300)


def test_where_deletes_alone_wait_none_of_them_is_looked_at_for_writes() -> None:
    tier = WriteBehind[str](1000, lambda value: None)
    for number in range(50_000):
        tier.delete(f"{number}", 1 + number)
    tracemalloc.start()
    try:
        assert not tier.drop_writes()
        assert tracemalloc.get_traced_memory()[1] < 50_000
    finally:
        tracemalloc.stop()
