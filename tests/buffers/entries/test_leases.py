"""Who gets which entry, who waits, and what ends a delivery."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Callable

import pytest

from asynckv import EntryAborted, KVFingerprint, LeaseLost
from asynckv.buffers.entries.entries import EntryState, StoredEntry, Waiter
from asynckv.buffers.entries.leases import (
    Matcher,
    WaitingQueries,
    find_by_id,
    matched_by_id,
)
from asynckv.testing import until
from asynckv.transfers.tokens import Query, make_query
from harness.ledgers import RecordingHolder, SteppedLedger, draft_of

ONE = make_query([1], None)


async def test_who_asks_for_a_taken_entry_by_its_id_is_told_so_and_not_others(
    bench: SteppedLedger,
) -> None:
    bench.insert("a")
    holder, _ = bench.select()
    named, _ = bench.select(make_query(None, None, entry_id="a"))
    other, _ = bench.select(make_query(None, None, entry_id="b"))
    bench.leases.acknowledge(holder.held())
    late, _ = bench.select(make_query(None, None, entry_id="a"))
    assert (named.heard, late.heard, other.heard) == (["taken"], ["taken"], [])


async def test_what_is_taken_while_many_entries_leave_a_closed_buffer_counts() -> None:
    bench = SteppedLedger(1000)
    for number in range(66):
        bench.insert(f"{number}", nbytes=1)
    last, _ = bench.select(make_query(None, None, entry_id="65"))
    closing = bench.leases.closing()
    next(closing)
    bench.leases.acknowledge(last.held())
    assert not [*closing]
    assert bench.ledger.counters.dropped == 65


async def test_an_entry_whose_insert_failed_is_waited_for_by_its_id(
    bench: SteppedLedger,
) -> None:
    bench.ledger.forsake(bench.begin("a"))
    waiting, _ = bench.select(make_query(None, None, entry_id="a"))
    bench.insert("a")
    assert waiting.entry_id == "a"


async def test_a_stale_acknowledgement_is_refused(bench: SteppedLedger) -> None:
    bench.insert("a")
    holder, _ = bench.select()
    stale = holder.held()
    bench.leases.give_back(stale, reached=False)
    with pytest.raises(LeaseLost):
        bench.leases.acknowledge(stale)
    bench.leases.give_back(stale, reached=True)
    assert bench.select()[0].held().attempt == 2


async def test_a_forgotten_query_gives_back_and_is_never_served_again(
    bench: SteppedLedger,
) -> None:
    entry = bench.begin("a")
    first, waiter = bench.select()
    bench.leases.forget(waiter)
    second, _ = bench.select()
    assert second.entry_id == "a"
    bench.leases.serve_again(waiter)
    bench.ledger.forsake(entry)
    assert first.heard == ["leased a"]


async def test_retracted_queries_are_served_in_the_order_of_their_wait(
    bench: SteppedLedger,
) -> None:
    bench.insert("other", tokens=(1,))
    entry = bench.begin("a", tokens=(1,), deliveries=2)
    old, old_waiter = bench.select(make_query([1], None, entry_id="a"), "old")
    young, _ = bench.select(make_query([1], None, entry_id="a"), "young")
    bench.leases.give_back(old.held(), reached=False)
    bench.leases.serve_again(old_waiter)
    bench.ledger.forsake(entry)
    bench.insert("a", tokens=(1,))
    assert (old.entry_id, young.entry_id) == ("a", None)


async def test_each_delivery_goes_to_another_consumer(bench: SteppedLedger) -> None:
    bench.insert("a", deliveries=2)
    one, _ = bench.select(consumer="one")
    again, _ = bench.select(consumer="one")
    two, _ = bench.select(consumer="two")
    assert (again.entry_id, two.entry_id) == (None, "a")
    bench.leases.acknowledge(one.held())
    assert again.entry_id is None
    bench.leases.acknowledge(two.held())
    assert not bench.table.entries


async def test_too_many_failures_drop_an_entry(
    bench: SteppedLedger,
    caplog: pytest.LogCaptureFixture,
) -> None:
    bench.insert("a")
    gone = bench.table.when_gone("a")
    for _ in range(2):
        bench.leases.give_back(bench.select()[0].held(), reached=True)
    with pytest.raises(EntryAborted) as caught:
        await gone
    assert caught.value.reason == "max_deliver"
    assert caplog.messages == ["entry 'a' failed in 2 consumers and is dropped"]


async def test_a_query_that_is_cancelled_has_not_failed_with_its_entry(
    bench: SteppedLedger,
) -> None:
    entry = bench.insert("a")
    for _ in range(3):
        holder, waiter = bench.select()
        bench.leases.reach(holder.held())
        bench.leases.forget(waiter)
    assert bench.select()[0].entry_id == "a"
    assert entry.failures == 0


async def test_who_held_an_entry_that_left_can_have_it_when_it_is_sent_again(
    bench: SteppedLedger,
) -> None:
    first = bench.insert("a", deliveries=3)
    bench.leases.acknowledge(bench.select(consumer="done")[0].held())
    bench.leases.reach(bench.select(consumer="held")[0].held())
    for _ in range(2):
        bench.leases.give_back(bench.select()[0].held(), reached=True)
    assert first.left_by == "max_deliver"
    again = bench.begin("a", deliveries=3)
    bench.table.resume(again, first.digest())
    bench.finish(again)
    names = ("done", "held")
    got = [bench.select(consumer=name)[0].entry_id for name in names]
    assert got == [None, "a"]


async def test_who_was_being_sent_an_entry_can_have_it_when_it_is_sent_again(
    bench: SteppedLedger,
) -> None:
    bench.insert("full", tokens=(9,), nbytes=90)
    entry = bench.begin("a", nbytes=50, deliveries=2)
    done, _ = bench.select(consumer="done")
    bench.finish(entry)
    bench.leases.acknowledge(done.held())
    held, _ = bench.select(consumer="held")
    bench.ledger.forsake(entry)
    again = bench.table.admit(entry.draft)
    bench.table.resume(again, entry.delivered_digest)
    bench.leases.offer(again)
    bench.select(consumer="done")
    assert held.held().entry is again


async def test_who_holds_too_long_loses_the_entry(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bench = SteppedLedger(max_hold_s=0.001)
    bench.insert("a")
    holder, _ = bench.select(streams=True)
    bench.leases.reach(holder.held())
    next_holder, _ = bench.select()
    await until(lambda: next_holder.entry_id == "a")
    assert holder.heard[-1] == "aborted lapsed"
    assert bench.ledger.counters.lapsed == 1
    assert caplog.records[0].levelno == logging.WARNING


async def test_a_delivery_that_takes_too_long_goes_to_another_and_waits_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bench = SteppedLedger(max_hold_s=0.001)
    bench.insert("a")
    slow, waiter = bench.select(consumer="slow")
    quick, _ = bench.select(consumer="quick")
    await until(lambda: quick.entry_id == "a")
    assert slow.heard == ["leased a", "retracted"]
    assert waiter.is_waiting and bench.leases.waiting_count == 1
    bench.leases.acknowledge(quick.held())
    bench.insert("b")
    assert slow.entry_id == "b"


async def test_tokens_of_deliveries_are_never_the_same(bench: SteppedLedger) -> None:
    bench.insert("a", deliveries=200)
    held = [bench.select(Query(None), f"{n}")[0].held() for n in range(200)]
    assert len({lease.token for lease in held}) == 200
    assert {len(lease.token) for lease in held} == {16}


async def test_10_000_queries_for_one_id_are_served_without_a_scan_each() -> None:
    bench = SteppedLedger(2**20)
    holders = [
        bench.select(Query(None, "a"), f"consumer {n}")[0] for n in range(10_000)
    ]
    loop = asyncio.get_running_loop()
    began = loop.time()
    bench.insert("a", deliveries=10_000)
    assert loop.time() - began < 5  # a scan each took minutes
    assert all(holder.entry_id == "a" for holder in holders)


class Clock:
    """Lets the loop's time jump."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        loop, self._late_s = asyncio.get_running_loop(), 0.0
        now = loop.time
        monkeypatch.setattr(loop, "time", lambda: now() + self._late_s)

    async def jump(self, seconds: float) -> None:
        self._late_s += seconds
        for _ in range(3):
            await asyncio.sleep(0)


async def test_a_delivery_that_ended_never_lapses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, bench = Clock(monkeypatch), SteppedLedger(max_hold_s=100)
    bench.insert("a")
    bench.leases.give_back(bench.select()[0].held(), reached=False)
    bench.leases.acknowledge(bench.select()[0].held())
    await clock.jump(200)
    assert bench.ledger.counters.lapsed == 0


async def test_the_time_of_a_holder_runs_from_when_it_first_had_the_entry(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, bench = Clock(monkeypatch), SteppedLedger(max_hold_s=100)
    bench.insert("a")
    holder, _ = bench.select()
    for lapsed in (0, 0, 1):
        await clock.jump(60)
        assert bench.ledger.counters.lapsed == lapsed
        bench.leases.reach(holder.held())


@pytest.fixture
def matcher() -> Matcher:
    return Matcher()


@pytest.fixture
def line() -> WaitingQueries:
    return WaitingQueries()


ONE_TOKEN = (1).to_bytes(8, "little")


def ready(name: str, tokens: tuple[int, ...] = (1,), seq: int = 1) -> StoredEntry:
    entry = StoredEntry(draft_of(name, tokens), seq)
    entry.state = EntryState.READY
    return entry


def waiting(
    query: Query, seq: int = 1, fingerprint: KVFingerprint | None = None
) -> Waiter:
    return Waiter(query, RecordingHolder(), seq, fingerprint)


def test_only_equal_fingerprints_match(matcher: Matcher) -> None:
    matcher.update(ready("a"))
    other = KVFingerprint(model="m")
    assert matcher.find(waiting(make_query([1], None), 1, other)) is None
    assert matcher.peek(ONE_TOKEN, other) == 0
    assert matcher.peek(ONE_TOKEN, None) == 1
    assert matcher.peek(b"", None) == 0


def test_everyone_leaves_in_the_order_of_their_wait(matcher: Matcher) -> None:
    queries = (Query(None, "id"), make_query([1], None), Query(None))
    for seq, query in enumerate(queries):
        matcher.enqueue(waiting(query, seq))
    assert [waiter.seq for waiter in matcher.everyone()] == [0, 1, 2]
    assert matcher.waiting_count == 0
    assert matcher.everyone() == []


def test_an_insert_that_may_fail_is_shown_to_no_stream() -> None:
    entry = ready("a")
    entry.state = EntryState.FILLING
    waiter = waiting(make_query([1], None))
    assert waiter.may_have(entry)
    waiter.holder.streams = True
    assert not waiter.may_have(entry)


def test_what_is_its_consumers_alone_is_found_by_nobody() -> None:
    maker, waiter = Matcher(), waiting(make_query([1], None))
    entry = ready("a")
    maker.update(entry)
    assert maker.find(waiter) == (entry, 1)
    entry.owner_gone = True
    maker.update(entry)
    assert maker.find(waiter) is None
    assert maker.next_for(entry) is None


def test_an_id_finds_its_entry_if_the_tokens_agree() -> None:
    entries = {"a": ready("a", (1, 2))}
    Matcher().update(entries["a"])
    found = find_by_id(entries, waiting(make_query([1], None, entry_id="a")))
    assert found == (entries["a"], 1)
    assert find_by_id(entries, waiting(make_query([2], None, entry_id="a"))) is None
    assert find_by_id(entries, waiting(Query(None, "b"))) is None


def test_an_id_finds_nothing_that_has_no_delivery_left_or_is_of_another_model() -> None:
    entries = {"a": ready("a")}
    by_id = Query(None, "a")
    assert find_by_id(entries, waiting(by_id)) is None
    Matcher().update(entries["a"])
    assert find_by_id(entries, waiting(by_id)) == (entries["a"], 0)
    other = KVFingerprint(model="m")
    assert find_by_id(entries, waiting(by_id, 1, other)) is None


ENTRY = StoredEntry(draft_of("a", (1, 2)), 1)


def in_line(line: WaitingQueries, query: Query, seq: int) -> Waiter:
    waiter = Waiter(query, RecordingHolder(), seq, None)
    line.add(waiter)
    return waiter


def oldest(line: WaitingQueries) -> tuple[int, int] | None:
    found = line.oldest(ENTRY, lambda waiter: True)
    return None if found is None else (found[0].seq, found[1])


def test_the_lowest_seq_of_every_kind_of_query_wins(line: WaitingQueries) -> None:
    in_line(line, Query(None), 4)
    in_line(line, make_query([1], None), 3)
    assert oldest(line) == (3, 1)
    in_line(line, Query(None, "a"), 2)
    assert oldest(line) == (2, 0)
    in_line(line, make_query([1, 2, 3], None, entry_id="a"), 1)
    assert oldest(line) == (1, 2)


def test_who_comes_back_has_its_old_place(line: WaitingQueries) -> None:
    first, second = (in_line(line, Query(None, "a"), seq) for seq in (1, 2))
    line.remove(first)
    assert oldest(line) == (2, 0)
    line.add(first)
    assert oldest(line) == (1, 0)
    line.remove(second)
    line.remove(first)
    line.remove(first)
    assert oldest(line) is None


def test_who_is_refused_is_passed_over(line: WaitingQueries) -> None:
    for query in (Query(None), Query(None, "a"), make_query([1], None)):
        for seq in (1, 2):
            in_line(line, query, seq)
    found = line.oldest(ENTRY, lambda waiter: waiter.seq == 2)
    assert found is not None
    assert found[0].seq == 2


def test_a_query_says_how_much_must_match(line: WaitingQueries) -> None:
    in_line(line, make_query([1], None, match="exact"), 1)
    in_line(line, make_query([1, 2, 3], None, min_matched_tokens=3), 2)
    assert oldest(line) is None
    in_line(line, make_query([1, 2], None, match="exact"), 3)
    assert oldest(line) == (3, 2)


def calls_in(work: Callable[[], object]) -> int:
    """Return how many functions ``work`` calls."""
    calls = list[str]()
    sys.setprofile(lambda frame, event, arg: calls.append(event))
    try:
        work()
    finally:
        sys.setprofile(None)
    return calls.count("call")


def test_a_thousand_whom_an_entry_does_not_match_are_not_asked(
    line: WaitingQueries,
) -> None:
    for seq in range(1000):
        tokens = [1, 2, seq]
        in_line(line, make_query(tokens, None, match="exact"), seq)
        in_line(line, make_query([1], None, match="exact"), seq)
    assert calls_in(lambda: oldest(line)) < 100
    assert oldest(line) is None


def test_an_id_with_tokens_asks_for_both() -> None:
    def matched(tokens: list[int], at_least: int = 1) -> int | None:
        query = make_query(tokens, None, entry_id="a", min_matched_tokens=at_least)
        return matched_by_id(Waiter(query, RecordingHolder(), 1, None), ENTRY)

    assert matched([1, 2, 3]) == 2
    assert matched([2]) is None
    assert matched([1], 2) is None


async def test_who_waits_for_another_models_entry_gets_none(
    bench: SteppedLedger,
) -> None:
    holder = RecordingHolder()
    bench.leases.select(ONE, holder, KVFingerprint("another model"))
    bench.insert("a")
    assert holder.heard == [] and bench.leases.waiting_count == 1


async def test_a_model_that_nobody_has_an_entry_of_any_more_keeps_no_index(
    bench: SteppedLedger,
) -> None:
    matcher = bench.leases._matcher
    assert bench.leases.peek(b"\0" * 8, KVFingerprint("some model")) == 0
    bench.insert("a")
    _, waiter = bench.select(make_query([2], None))
    bench.leases.forget(waiter)
    bench.ledger.withdraw("a")
    assert not matcher._indexes and not matcher._queues
