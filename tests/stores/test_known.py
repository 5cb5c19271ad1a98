"""What was heard of keys is believed for a while, and not against better knowledge."""

from __future__ import annotations

from asynckv.stores.known import KnownKeys

EVER = float("inf")


def test_of_a_key_that_nobody_asked_for_nothing_is_known() -> None:
    assert KnownKeys().is_there("a", 0.0) is None


def test_an_answer_is_believed_for_a_while() -> None:
    known = KnownKeys()
    known.answer("a", known.ask("a"), EVER, 100.0)
    known.answer("b", known.ask("b"), 0.0, 100.0)
    assert (known.is_there("a", 100.5), known.is_there("b", 100.5)) == (True, False)
    assert (known.is_there("a", 102.0), known.is_there("b", 102.0)) == (True, None)
    assert known.is_there("a", 161.0) is None


def test_a_key_is_believed_to_be_there_no_longer_than_its_value_is_valid() -> None:
    known = KnownKeys()
    known.changed("a", 5.0, 100.0)
    assert known.is_there("a", 104.0) is True
    assert known.is_there("a", 105.0) is None


def test_no_answer_says_nothing() -> None:
    known = KnownKeys()
    known.changed("a", EVER, 0.0)
    known.answer("a", known.ask("a"), None, 0.0)
    assert known.is_there("a", 0.0) is True


def test_who_changes_a_key_knows_better() -> None:
    known = KnownKeys()
    known.changed("a", EVER, 0.0)
    assert known.is_there("a", 0.0) is True
    known.begin_change("a")
    assert known.is_there("a", 0.0) is None
    known.changed("a", 0.0, 0.0)
    assert known.is_there("a", 0.0) is False


def test_an_answer_from_before_a_change_is_void() -> None:
    known = KnownKeys()
    question = known.ask("a")
    known.changed("a", 0.0, 0.0)
    known.answer("a", question, EVER, 0.0)
    assert known.is_there("a", 0.0) is False
    question = known.ask("a")
    known.begin_change("a")
    known.answer("a", question, EVER, 0.0)
    assert known.is_there("a", 0.0) is None


def test_of_two_questions_the_later_one_is_answered() -> None:
    known = KnownKeys()
    first, second = known.ask("a"), known.ask("a")
    known.answer("a", first, 0.0, 0.0)
    assert known.is_there("a", 0.0) is None
    known.answer("a", second, EVER, 0.0)
    assert known.is_there("a", 0.0) is True


def test_no_more_keys_are_kept_than_may_be() -> None:
    known = KnownKeys(max_keys=2)
    for key in "abac":
        known.changed(key, EVER, 0.0)
    assert len(known) == 2
    assert [known.is_there(key, 0.0) for key in "abc"] == [True, None, True]
