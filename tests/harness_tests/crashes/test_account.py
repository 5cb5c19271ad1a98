"""The account can fail: what was lost, doubled or wrong is named."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from asynckv.abc import KVEntry
from asynckv.buffers.lookup import LookupBuffer
from asynckv.buffers.statistics import LookupStatistics
from harness.crashes.account import Account, Findings
from harness.crashes.workers import Report, is_right, named_tensors, tokens_of


def now(inserted: int, acknowledged: int) -> LookupStatistics:
    empty = LookupBuffer("1KiB").statistics()
    return dataclasses.replace(empty, inserted=inserted, acknowledged=acknowledged)


def judge(*told: Report, left: tuple[str, ...] = (), out: int = 1) -> Findings:
    account = Account()
    for report in told:
        account.hear(report)
    return account.close(list(left), now(out + len(left), out))


IN = (Report(1, "begun", "p-0", 0), Report(1, "in", "p-0"))


GOT, LEAVING = Report(2, "got", "p-0", 1), Report(2, "leaving", "p-0")


USED = (Report(2, "wait"), Report(2, "got", "p-0", 1), Report(2, "done", "p-0"))


@pytest.mark.parametrize(
    ("told", "left", "wrong"),
    [
        (IN, (), "lost"),
        ((*IN, *USED, *USED), (), "more than once"),
        ((*IN, *USED), ("p-0",), "had been used"),
        ((*IN,), ("p-0", "p-0"), "drained 2 times"),
        ((*IN, *USED, Report(2, "wrong", "p-0")), (), "wrong bytes"),
        ((*IN, *USED, Report(2, "gone", number=256)), (), "ended by 256"),
    ],
)
def test_a_broken_promise_is_named(
    told: tuple[Report, ...], left: tuple[str, ...], wrong: str
) -> None:
    assert wrong in "; ".join(judge(*told, left=left).wrongs)


AWAIT, ENTER = Report(2, "wait", number=1), Report(2, "wait")


@pytest.mark.parametrize(
    ("told", "consumer", "is_right"),
    [
        ((AWAIT,), "c.awaits", True),
        ((AWAIT, GOT), "c.awaits@host", True),
        ((ENTER, GOT, LEAVING), "c@host", True),
        ((ENTER, GOT, LEAVING), "", False),
        ((ENTER, GOT), "c", False),
        ((ENTER,), "c", False),
        ((AWAIT, ENTER), "c.awaits", False),
    ],
)
def test_one_that_was_killed_may_have_acknowledged_what_it_was_about_to(
    told: tuple[Report, ...], consumer: str, is_right: bool
) -> None:
    account = Account()
    for report in (*IN, *told):
        account.hear(report)
    if consumer:
        account.hear_acknowledged("p-0", consumer)
    account.hear(Report(2, "gone", number=9))
    found = account.close([], now(1, 1))
    assert ("lost" in "; ".join(found.wrongs)) == (not is_right)
    assert not is_right or (found.unseen, found.wrongs) == (1, ())


def test_who_gets_an_entry_later_answers_for_it_alone() -> None:
    account = Account()
    for report in (*IN, Report(2, "wait"), GOT, LEAVING, Report(2, "gone", number=9)):
        account.hear(report)
    for report in (Report(3, "got", "p-0", 2), Report(3, "gone", number=9)):
        account.hear(report)
    account.hear_acknowledged("p-0", "c")
    assert account.close([], now(1, 1)).wrongs == ("lost: p-0",)


def test_a_small_one_may_come_again() -> None:
    plain = (Report(2, "got", "p-0", 1), Report(2, "done", "p-0", 1))
    again = (Report(3, "got", "p-0", 2), Report(3, "done", "p-0", 1))
    found = judge(*IN, *plain, *again)
    assert (found.redelivered, found.wrongs) == (1, ())


TAKEN = (AWAIT, GOT, Report(2, "done", "p-0", 1))


KILLED = Report(2, "gone", number=9)


@pytest.mark.parametrize(
    ("told", "is_right"),
    [
        ((*TAKEN, KILLED), True),
        ((*TAKEN, AWAIT, KILLED), True),
        (TAKEN, False),
        ((*TAKEN, AWAIT, Report(2, "done", "p-1", 1), KILLED), False),
        ((*USED, KILLED), False),
    ],
)
def test_the_last_small_one_that_a_killed_one_took_may_still_be_there(
    told: tuple[Report, ...], is_right: bool
) -> None:
    wrongs = judge(*IN, *told, left=("p-0",), out=0).wrongs
    assert ("p-0 was there and had been used" not in wrongs) is is_right


def test_a_producer_goes_on_with_what_it_does_not_know_to_be_in() -> None:
    account = Account()
    assert account.next_number("p") == 0
    account.hear(Report(1, "begun", "p-0", 0))
    assert account.next_number("p") == 0
    account.hear(Report(1, "in", "p-0"))
    assert account.next_number("p") == 1


def test_what_went_in_is_used_once_or_still_there_and_adds_up() -> None:
    found = judge(*IN, *USED)
    assert (found.inserted, found.used, found.wrongs) == (1, 1, ())
    assert judge(*IN, left=("p-0",), out=0).wrongs == ()
    found = Account().close([], dataclasses.replace(now(2, 1), expired=1))
    assert len(found.wrongs) == 2


def test_an_entry_is_what_its_id_says_to_the_last_bit_and_with_its_tokens() -> None:
    name, tensors = "producer_0-1", named_tensors("producer_0-1")
    key = {name.removesuffix(".key"): tensor for name, tensor in tensors.items()}
    whole = KVEntry(torch.tensor(tokens_of(name)), None, key, None, None)
    assert is_right(name, whole) and is_right(name, tensors)
    assert not is_right("producer_0-2", whole)
    for tokens in (torch.tensor([1]), None):
        assert not is_right(name, KVEntry(tokens, None, key, None, None))
    tensors["2.key"][-1] ^= 1
    assert not is_right(name, tensors)
