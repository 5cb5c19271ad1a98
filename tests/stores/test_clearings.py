"""What is cleared is void at once; what is changed after it waits for its end."""

from __future__ import annotations

import pytest

from asynckv.abc import TierResult
from asynckv.stores.clearings import TierClearing
from asynckv.stores.write_behind import WriteBehind


def begin_clearing(tier: WriteBehind[str], prefix: str) -> TierClearing:
    tier.clearings.clear(prefix, 1)
    assert tier.take_clearing() is None
    while tier.forget_cleared():
        pass
    clearing = tier.take_clearing()
    assert clearing is not None
    return clearing


def test_a_prefix_that_is_cleared_again_meanwhile_is_cleared_twice() -> None:
    tier = WriteBehind[str](10, lambda value: None)
    first = begin_clearing(tier, "p/")
    tier.clearings.clear("p/", 2)
    tier.clearings.ended(first, TierResult.DONE)
    assert tier.forget_cleared() and tier.is_behind(2)
    assert tier.take_clearing() == TierClearing("p/", 2)


def test_a_clearing_that_has_failed_is_made_when_it_is_tried_again() -> None:
    tier = WriteBehind[str](10, lambda value: None)
    clearing = begin_clearing(tier, "p/")
    tier.clearings.ended(clearing, TierResult.FAILED)
    assert tier.take_clearing() is None and not tier.is_behind(1)
    tier.clearings.retry("p/")
    assert tier.take_clearing() == clearing and tier.is_behind(1)


def test_what_came_after_a_clearing_that_failed_waits_while_it_is_tried_again() -> None:
    tier = WriteBehind[str](10, lambda value: None)
    clearing = begin_clearing(tier, "p/")
    tier.clearings.ended(clearing, TierResult.FAILED)
    tier.write("p/a", 2, "v", 1, "v")
    tier.clearings.retry("p/")
    assert not tier.take(9, 99)
    assert tier.take_clearing() == clearing and not tier.take(9, 99)
    tier.clearings.ended(clearing, TierResult.DONE)
    assert [change.key for change in tier.take(9, 99)] == ["p/a"]


def test_a_clearing_that_does_not_end_keeps_no_changes_waiting() -> None:
    tier = WriteBehind[str](10, lambda value: None)
    clearing = begin_clearing(tier, "p/")
    tier.write("p/a", 2, "v", 1, "v")
    tier.clearings.late(clearing)
    tier.clearings.retry("p/")
    assert [change.key for change in tier.take(9, 99)] == ["p/a"]
    tier.clearings.clear("p/", 3)
    tier.write("p/b", 4, "v", 1, "v")
    assert tier.take_clearing() is None and not tier.clearings.pending_epochs()
    assert [change.key for change in tier.take(9, 99)] == ["p/b"]


def test_what_was_cleared_again_is_cleared_when_a_late_clearing_has_ended() -> None:
    tier = WriteBehind[str](10, lambda value: None)
    late = begin_clearing(tier, "p/")
    tier.clearings.late(late)
    tier.clearings.clear("p/", 2)
    tier.clearings.ended(late, TierResult.DONE)
    while tier.forget_cleared():
        pass
    assert tier.take_clearing() == TierClearing("p/", 2) and tier.is_behind(2)


def test_what_waits_for_a_clearing_leaves_room_to_others() -> None:
    tier = WriteBehind[str](10, lambda value: None)
    begin_clearing(tier, "p/")
    assert tier.write("p/a", 2, "v", 5, "v")
    assert not tier.write("p/b", 3, "v", 1, "v")
    assert tier.write("q/a", 4, "v", 5, "v")


def test_all_that_waited_of_several_models_is_let_go_of_before_they_are_cleared() -> (
    None
):
    tier = WriteBehind[str](10**6, lambda value: None)
    for number in range(900):
        tier.write(f"{'pqr'[number % 3]}/{number}", 1 + number, "v", 1, "v")
    tier.clearings.clear("p/", 1000)
    assert tier.forget_cleared() and tier.take_clearing() is None
    tier.clearings.clear("q/", 1001)
    while tier.forget_cleared():
        pass
    assert (tier.known_keys, tier.nbytes, tier.dropped) == (300, 300, 600)
    prefixes = [one and one.prefix for one in (tier.take_clearing() for _ in range(3))]
    assert prefixes == ["p/", "q/", None]


def test_while_a_model_is_cleared_the_changes_of_others_go_on() -> None:
    tier = WriteBehind[str](1000, lambda value: None)
    clearing = begin_clearing(tier, "p/")
    for number in range(200):
        tier.write(f"p/{number}", 2 + number, "v", 1, "v")
    tier.delete("p/last", 300)
    tier.write("q/a", 301, "v", 1, "v")
    assert [change.key for change in tier.take(9, 99)] == ["q/a"]
    assert not tier.take(9, 99) and tier.is_behind(1)
    tier.clearings.ended(clearing, TierResult.DONE)
    tier.write("q/b", 302, "v", 1, "v")
    assert [change.key for change in tier.take(3, 99)] == ["p/0", "p/1", "p/2"]


def test_where_nothing_could_be_cleared_a_key_may_be_new_whoever_wrote_it() -> None:
    tier = WriteBehind[str](1000, lambda value: None)
    clearing = begin_clearing(tier, "p/")
    assert not tier.may_be_new("p/a")
    tier.clearings.ended(clearing, TierResult.REFUSED)
    tier.clearings.retry("p/")
    assert tier.take_clearing() is None and tier.may_be_new("p/a")
    tier.write("p/a", 2, "v", 1, "v")
    assert not tier.may_be_new("p/a")
    (change,) = tier.take(9, 99)
    tier.ended(change, is_done=True)
    assert tier.may_be_new("p/a") and tier.may_be_new("p/b")
    assert tier.valid_from("p/a").has(2, "v") and not tier.valid_from("p/b").has(0, "v")


def test_a_key_that_was_written_where_a_clearing_has_failed_may_be_new() -> None:
    tier = WriteBehind[str](1000, lambda value: None)
    tier.clearings.ended(begin_clearing(tier, "p/"), TierResult.FAILED)
    tier.write("p/a", 2, "v", 1, "v")
    (change,) = tier.take(9, 99)
    tier.ended(change, is_done=True)
    assert tier.may_be_new("p/a") and not tier.may_be_new("p/b")


def test_of_ever_so_many_models_that_were_cleared_nothing_old_is_valid() -> None:
    tier = WriteBehind[str](1000, lambda value: None)
    clearing = begin_clearing(tier, "under way/")
    for number in range(3000):
        tier.clearings.clear(f"{number}/", 2 + number)
    assert len(tier) <= 1024
    assert not any(tier.valid_from(f"{n}/a").has(1 + n, "v") for n in range(3000))
    tier.clearings.ended(clearing, TierResult.DONE)


def test_a_clearing_that_has_ended_makes_room_before_one_that_has_not() -> None:
    tier = WriteBehind[str](1000, lambda value: None)
    clearing = begin_clearing(tier, "failed/")
    tier.clearings.ended(clearing, TierResult.FAILED)
    clearing = begin_clearing(tier, "done/")
    tier.clearings.ended(clearing, TierResult.DONE)
    clear = tier.clearings.clear
    given_up = [clear(f"{number}/", 2 + number) for number in range(1023)]
    assert given_up == [None] * 1023
    assert tier.may_be_new("done/a") and not tier.may_be_new("failed/a")


def test_what_was_given_up_stays_hidden_but_for_what_is_written_then() -> None:
    tier = WriteBehind[str](1000, lambda value: None)
    failed = begin_clearing(tier, "p/")
    tier.clearings.ended(failed, TierResult.FAILED)
    clear = tier.clearings.clear
    given_up = [clear(f"{number}/", 2 + number) for number in range(1024)]
    assert given_up == [None] * 1023 + ["p/"]
    assert not tier.may_be_new("p/a") and not tier.valid_from("p/a").has(0, "v")
    tier.write("p/a", 2000, "v", 1, "v")
    (change,) = tier.take(9, 99)
    tier.ended(change, is_done=True)
    assert tier.may_be_new("p/a") and not tier.may_be_new("p/b")
    tier.clearings.clear("p/", 3000)
    while tier.forget_cleared():
        pass
    while (clearing := tier.take_clearing()) is not None:
        tier.clearings.ended(clearing, TierResult.DONE)
    assert tier.may_be_new("p/b")


@pytest.mark.parametrize("deletes_old", [False, True])
def test_a_late_write_that_ends_while_its_model_is_cleared_is_hidden_or_deleted(
    deletes_old: bool,
) -> None:
    tier = WriteBehind[str](10, lambda value: None, deletes_old=deletes_old)
    tier.write("p/a", 0, "v", 1, "v")
    (change,) = tier.take(9, 99)
    change.is_late = True
    clearing = begin_clearing(tier, "p/")
    tier.ended(change, is_done=True)
    tier.clearings.ended(clearing, TierResult.DONE)
    assert not tier.may_be_new("p/a") and not tier.valid_from("p/a").has(0, "v")
    assert [one.is_delete for one in tier.take(9, 99)] == [True] * deletes_old


@pytest.mark.parametrize("ends_before", [False, True])
def test_a_write_that_was_not_answered_may_arrive_after_its_model_was_cleared(
    ends_before: bool,
) -> None:
    tier = WriteBehind[str](10, lambda value: None)
    tier.write("p/a", 0, "v", 1, "v")
    (change,) = tier.take(9, 99)
    if ends_before:
        tier.ended(change, is_done=False)
    tier.clearings.clear("p/", 1)
    while tier.forget_cleared():
        pass
    if not ends_before:
        tier.ended(change, is_done=False)
    tier.clearings.ended(TierClearing("p/", 1), TierResult.DONE)
    assert not tier.may_be_new("p/a") and tier.may_be_new("p/b")
