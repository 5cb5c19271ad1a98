from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from asynckv.buffers.entries import EntryState, StoredEntry, Waiter
from asynckv.buffers.ledger import Ledger
from asynckv.buffers.queries import Query, make_query
from asynckv.buffers.room import Room
from asynckv.errors import EntryAborted, EntryConflict, EntryTooLarge, LeaseLost
from asynckv.tensors.arena import HeapArena
from asynckv.testing.blocked import until
from asynckv.testing.holders import RecordingHolder, draft_of

ANY = Query(None)
ONE = make_query([1], None)


class Bench:
    """A ledger and its line for room, driven step by step."""

    def __init__(
        self, max_bytes: int = 100, *, max_hold_s: float | None = None
    ) -> None:
        self.arena = HeapArena(max_bytes)
        self.ledger = Ledger(
            self.arena,
            max_deliver=2,
            max_hold_s=max_hold_s,
            changed=lambda: self.room.change(),
        )
        self.room = Room(
            lambda entry: self.ledger.give_room(entry),
            lambda entry: self.ledger.adopt(entry),
        )

    def begin(self, entry_id: str, **draft: object) -> StoredEntry:
        entry = self.ledger.admit(draft_of(entry_id, **draft), None)  # type: ignore[arg-type]
        assert entry is not None
        if not self.room.join(entry):
            self.ledger.announce(entry)
        return entry

    def finish(self, entry: StoredEntry) -> None:
        self.ledger.landed(entry, 0, b"d")
        self.ledger.commit(entry)

    def insert(self, entry_id: str, **draft: object) -> StoredEntry:
        entry = self.begin(entry_id, **draft)
        self.finish(entry)
        return entry

    def select(
        self, query: Query = ONE, name: str = "consumer", *, streams: bool = False
    ) -> tuple[RecordingHolder, Waiter]:
        holder = RecordingHolder(name, streams=streams)
        return holder, self.ledger.select(query, holder, None)


async def test_an_entry_is_leased_and_leaves_at_the_acknowledgement() -> None:
    bench = Bench()
    bench.insert("a")
    holder, _ = bench.select()
    assert holder.entry_id == "a"
    assert bench.select()[0].entry_id is None
    bench.ledger.acknowledge(holder.held())
    assert bench.arena.used_bytes == 0
    assert not bench.ledger.entries


async def test_a_stale_acknowledgement_is_refused() -> None:
    bench = Bench()
    bench.insert("a")
    holder, _ = bench.select()
    stale = holder.held()
    bench.ledger.give_back(stale, reached=False)
    with pytest.raises(LeaseLost):
        bench.ledger.acknowledge(stale)
    bench.ledger.give_back(stale, reached=True)
    assert bench.select()[0].held().attempt == 2


async def test_a_forgotten_query_gives_back_and_is_never_served_again() -> None:
    bench = Bench()
    entry = bench.begin("a")
    first, waiter = bench.select()
    bench.ledger.forget(waiter)
    second, _ = bench.select()
    assert second.entry_id == "a"
    bench.ledger.serve(waiter)
    bench.ledger.forsake(entry)
    assert first.heard == ["leased a"]


async def test_a_failed_insert_leaves_no_trace_and_its_query_keeps_its_place() -> None:
    bench = Bench()
    entry = bench.begin("a")
    first, _ = bench.select()
    second, _ = bench.select()
    bench.ledger.forsake(entry)
    assert first.heard == ["leased a", "retracted"]
    bench.insert("b")
    assert (first.entry_id, second.entry_id) == ("b", None)
    with pytest.raises(KeyError):
        bench.ledger.when_gone("a")


async def test_retracted_queries_are_served_in_the_order_of_their_wait() -> None:
    bench = Bench()
    bench.insert("other", tokens=(1,))
    entry = bench.begin("a", tokens=(1,), deliveries=2)
    old, old_waiter = bench.select(make_query([1], None, entry_id="a"), "old")
    young, _ = bench.select(make_query([1], None, entry_id="a"), "young")
    bench.ledger.give_back(old.held(), reached=False)
    bench.ledger.serve(old_waiter)
    bench.ledger.forsake(entry)
    bench.insert("a", tokens=(1,))
    assert (old.entry_id, young.entry_id) == ("a", None)


async def test_an_entry_without_room_goes_straight_to_who_selects_it() -> None:
    bench = Bench()
    bench.insert("full", tokens=(9,), nbytes=90)
    entry = bench.begin("a", nbytes=50)
    holder, _ = bench.select()
    assert entry.state is EntryState.DIRECT
    assert (bench.ledger.outside_bytes, holder.charged_bytes) == (58, 58)
    bench.finish(entry)
    bench.ledger.acknowledge(holder.held())
    assert (bench.ledger.outside_bytes, holder.charged_bytes) == (0, 0)


async def test_a_consumer_whose_bound_is_full_gets_no_direct_delivery() -> None:
    bench = Bench()
    bench.insert("full", tokens=(9,), nbytes=90)
    bench.begin("a", nbytes=50)
    holder = RecordingHolder(bound=57)
    bench.ledger.select(ONE, holder, None)
    assert holder.entry_id is None
    holder.bound = 58
    bench.ledger.offer_waiting(list(bench.ledger.entries.values()))
    assert holder.entry_id == "a"


async def test_a_direct_delivery_given_back_begins_again_for_the_next() -> None:
    bench = Bench()
    bench.insert("full", tokens=(9,), nbytes=90)
    entry = bench.begin("a", nbytes=50)
    first, _ = bench.select()
    second, _ = bench.select()
    bench.finish(entry)
    bench.ledger.give_back(first.held(), reached=True)
    assert second.entry_id == "a"
    assert entry.state is EntryState.DIRECT
    assert not entry.complete
    assert bench.ledger.outside_bytes == 58


async def test_an_early_acknowledgement_does_not_restart_bytes_on_their_way() -> None:
    bench = Bench()
    bench.insert("full", tokens=(9,), nbytes=90)
    entry = bench.begin("a", nbytes=50, deliveries=2)
    holder, _ = bench.select(streams=True)
    region = entry.parts[0].region
    bench.ledger.acknowledge(holder.held())
    assert entry.parts[0].region is region
    bench.finish(entry)
    assert entry.state is EntryState.WAITING
    assert bench.ledger.outside_bytes == 0


async def test_a_forsaken_direct_delivery_is_its_consumers_alone() -> None:
    bench = Bench()
    bench.insert("full", tokens=(9,), nbytes=90)
    entry = bench.begin("a", nbytes=50)
    holder, _ = bench.select()
    bench.finish(entry)
    bench.ledger.forsake(entry)
    assert bench.ledger.is_undecided("a")
    assert bench.select()[0].entry_id is None
    bench.ledger.give_back(holder.held(), reached=False)
    assert "a" not in bench.ledger.entries
    assert bench.ledger.outside_bytes == 0


async def test_a_forsaken_stream_outside_is_its_consumers_alone() -> None:
    bench = Bench()
    bench.insert("full", tokens=(9,), nbytes=90)
    entry = bench.begin("a", nbytes=50, streaming=True, deliveries=2)
    one, _ = bench.select(name="one")
    two, _ = bench.select(name="two")
    bench.finish(entry)
    bench.ledger.abort_streaming(entry)
    bench.ledger.acknowledge(one.held())
    bench.ledger.acknowledge(two.held())
    assert bench.ledger.when_gone("a").done()
    assert bench.ledger.outside_bytes == 0


async def test_a_stream_that_began_outside_moves_in_when_there_is_room() -> None:
    bench = Bench()
    full = bench.insert("full", tokens=(9,), nbytes=80)
    entry = bench.begin("a", nbytes=50, streaming=True)
    holder, _ = bench.select()
    bench.finish(entry)
    bench.ledger.give_back(holder.held(), reached=False)
    assert bench.ledger.outside_bytes == 58
    assert bench.ledger.withdraw(full.entry_id)
    assert entry.in_arena
    assert (bench.ledger.outside_bytes, bench.arena.used_bytes) == (0, 58)


async def test_each_delivery_goes_to_another_consumer() -> None:
    bench = Bench()
    bench.insert("a", deliveries=2)
    one, _ = bench.select(name="one")
    again, _ = bench.select(name="one")
    two, _ = bench.select(name="two")
    assert (again.entry_id, two.entry_id) == (None, "a")
    bench.ledger.acknowledge(one.held())
    assert again.entry_id is None
    bench.ledger.acknowledge(two.held())
    assert not bench.ledger.entries


async def test_time_is_judged_again_after_each_acknowledgement() -> None:
    bench = Bench()
    entry = bench.insert("a", deliveries=2, ttl_s=60)
    holder, _ = bench.select()
    entry.expires_at = 0.0  # its time ran out while it was held
    bench.ledger.acknowledge(holder.held())
    assert bench.ledger.counters.expired == 1
    assert bench.arena.used_bytes == 0


async def test_an_entry_in_hand_does_not_expire() -> None:
    bench = Bench()
    bench.insert("a", ttl_s=0)
    bench.insert("b", tokens=(2,), ttl_s=0)
    holder, _ = bench.select()
    await until(lambda: "b" not in bench.ledger.entries)
    assert "a" in bench.ledger.entries
    bench.ledger.give_back(holder.held(), reached=False)
    assert "a" not in bench.ledger.entries


async def test_too_many_failures_drop_an_entry(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bench = Bench()
    bench.insert("a")
    gone = bench.ledger.when_gone("a")
    for _ in range(2):
        bench.ledger.give_back(bench.select()[0].held(), reached=True)
    with pytest.raises(EntryAborted) as caught:
        await gone
    assert caught.value.reason == "max_deliver"
    assert caplog.messages == ["entry a failed in 2 consumers and is dropped"]


async def test_who_holds_too_long_loses_the_entry(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bench = Bench(max_hold_s=0.001)
    bench.insert("a")
    holder, _ = bench.select(streams=True)
    for _ in range(2):  # told twice, it counts from the first time
        bench.ledger.reach(holder.held())
    next_holder, _ = bench.select()
    await until(lambda: next_holder.entry_id == "a")
    assert holder.heard[-1] == "aborted lapsed"
    assert bench.ledger.counters.lapsed == 1
    assert caplog.records[0].levelno == logging.WARNING


async def test_the_same_contents_are_known_and_others_a_conflict() -> None:
    bench = Bench()
    entry = bench.insert("a")
    digest = bench.ledger.known_digest("a")
    assert digest == entry.digest()
    assert bench.ledger.admit(draft_of("a"), digest) is None
    with pytest.raises(EntryConflict):
        bench.ledger.admit(draft_of("a"), b"other")
    bench.ledger.acknowledge(bench.select()[0].held())
    assert bench.ledger.admit(draft_of("a"), digest) is None


async def test_what_could_never_fit_is_refused() -> None:
    with pytest.raises(EntryTooLarge):
        Bench().ledger.admit(draft_of("a", nbytes=93), None)


async def test_a_cancelled_insert_does_not_forget_how_the_id_left_before() -> None:
    bench = Bench()
    bench.insert("a")
    assert bench.ledger.withdraw("a")
    bench.ledger.forsake(bench.begin("a"))
    with pytest.raises(EntryAborted, match="withdrawn"):
        bench.ledger.when_gone("a")


async def test_a_cancelled_wait_for_the_end_is_forgotten() -> None:
    bench = Bench()
    entry = bench.insert("a")
    for _ in range(3):
        bench.ledger.when_gone("a").cancel()
    await asyncio.sleep(0)
    assert not entry.gone


async def test_which_deliveries_counted_is_remembered() -> None:
    bench = Bench()
    bench.insert("a")
    lease = bench.select()[0].held()
    assert not bench.ledger.was_acknowledged("a", lease.token)
    bench.ledger.acknowledge(lease)
    assert bench.ledger.was_acknowledged("a", lease.token)
    assert not bench.ledger.was_acknowledged("a", b"another")


async def test_closing_ends_queries_and_what_no_application_holds() -> None:
    bench = Bench(1000)
    entry = bench.begin("filling")
    unreached, _ = bench.select()
    bench.insert("held", tokens=(2,))
    reached, _ = bench.select(make_query([2], None))
    bench.ledger.reach(reached.held())
    waiting, _ = bench.select(make_query([3], None))
    bench.ledger.close()
    assert unreached.heard == ["leased filling", "retracted", "closed"]
    assert waiting.heard == ["closed"]
    assert entry.left_by == "closed"
    bench.ledger.acknowledge(reached.held())
    assert bench.arena.used_bytes == 0


async def test_after_closing_nothing_given_back_stays_and_nobody_waits() -> None:
    bench = Bench()
    bench.insert("held")
    gone = bench.ledger.when_gone("held")
    reached, _ = bench.select()
    bench.ledger.reach(reached.held())
    bench.ledger.close()
    bench.ledger.give_back(reached.held(), reached=True)
    with pytest.raises(EntryAborted, match="closed"):
        await gone
    assert bench.select()[0].heard == ["closed"]
    assert (bench.arena.used_bytes, bench.ledger.waiting_count) == (0, 0)


async def test_an_insert_among_10_000_waiting_queries_asks_only_who_matches() -> None:
    bench = Bench(2**20)
    holders = [
        bench.select(make_query([7, n % 100, n], None))[0] for n in range(10_000)
    ]
    bench.insert("a", tokens=(7, 42, 4242))
    assert [h.entry_id for h in holders if h.heard] == ["a"]
    assert holders[4242].entry_id == "a"
    assert bench.ledger.waiting_count == 9_999


async def test_10_000_queries_for_one_id_are_served_without_a_scan_each() -> None:
    bench = Bench(2**20)
    holders = [
        bench.select(Query(None, "a"), f"consumer {n}")[0] for n in range(10_000)
    ]
    loop = asyncio.get_running_loop()
    began = loop.time()
    bench.insert("a", deliveries=10_000)
    assert loop.time() - began < 5  # a scan each took minutes
    assert all(holder.entry_id == "a" for holder in holders)


class ModelEntry:
    """One entry as the brute force keeps it."""

    def __init__(self, entry: StoredEntry, deliveries: int) -> None:
        self.entry = entry
        self.id = entry.entry_id
        self.tokens = tuple(entry.input_tokens.tensor().tolist())  # type: ignore[union-attr]
        self.nbytes = entry.nbytes
        self.state = "waiting"
        self.is_whole = False
        self.left = deliveries
        self.holders: list[str] = []
        self.consumers: set[str] = set()


class ModelQuery:
    """One query as the brute force keeps it."""

    def __init__(self, name: str, tokens: tuple[int, ...] | None) -> None:
        self.name, self.tokens = name, tokens
        self.holds: str | None = None


class Model:
    """Entries in order of insertion, queries in order of call; scans for all."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.entries: dict[str, ModelEntry] = {}
        self.queries: dict[str, ModelQuery] = {}

    def used(self) -> int:
        inside = ("filling", "ready")
        return sum(e.nbytes for e in self.entries.values() if e.state in inside)

    def outside(self) -> int:
        return sum(e.nbytes for e in self.entries.values() if e.state == "direct")

    def matched(self, entry: ModelEntry, query: ModelQuery) -> int | None:
        if entry.state == "direct" or len(entry.holders) >= entry.left:
            return None
        if query.tokens is None:
            return 0
        shared = min(len(query.tokens), len(entry.tokens))
        same = query.tokens[:shared] == entry.tokens[:shared]
        return shared if shared and same else None

    def lease(self, entry: ModelEntry, query: ModelQuery) -> None:
        query.holds = entry.id
        entry.holders.append(query.name)
        if entry.state == "waiting":
            entry.state = "direct"
            self.advance()

    def offer(self, entry: ModelEntry) -> None:
        for query in list(self.queries.values()):
            if query.holds is None and self.matched(entry, query) is not None:
                self.lease(entry, query)

    def advance(self) -> None:
        for entry in list(self.entries.values()):
            if entry.state == "waiting" and entry.id in self.entries:
                if self.used() + entry.nbytes > self.max_bytes:
                    return
                entry.state = "filling"
                self.offer(entry)

    def select(self, query: ModelQuery) -> None:
        self.queries[query.name] = query
        found = [(self.matched(e, query), e) for e in self.entries.values()]
        scored = [(matched, e) for matched, e in found if matched is not None]
        if scored:
            self.lease(max(scored, key=lambda pair: pair[0])[1], query)

    def insert(self, entry: ModelEntry) -> None:
        self.entries[entry.id] = entry
        self.advance()
        if entry.state == "waiting":
            self.offer(entry)

    def commit(self, entry: ModelEntry) -> None:
        entry.is_whole = True
        if entry.state == "filling":
            entry.state = "ready"
        elif not entry.holders:
            self.wait_again(entry)

    def wait_again(self, entry: ModelEntry) -> None:
        entry.state, entry.is_whole = "waiting", False
        self.advance()
        self.offer(entry)

    def end(self, query: ModelQuery, *, acknowledged: bool) -> None:
        entry = self.entries[query.holds or ""]
        entry.holders.remove(query.name)
        del self.queries[query.name]
        entry.left -= acknowledged
        if entry.left == 0:
            del self.entries[entry.id]
            self.advance()
        elif entry.state == "direct" and entry.is_whole:
            self.wait_again(entry)
        else:
            self.offer(entry)

    def drop(self, entry: ModelEntry) -> None:
        del self.entries[entry.id]
        self.advance()
        for name in sorted(entry.holders, key=list(self.queries).index):
            query = self.queries[name]
            query.holds = None
            self.reselect(query)

    def reselect(self, query: ModelQuery) -> None:
        found = [(self.matched(e, query), e) for e in self.entries.values()]
        scored = [(matched, e) for matched, e in found if matched is not None]
        if scored:
            self.lease(max(scored, key=lambda pair: pair[0])[1], query)


tokens_of = st.lists(st.sampled_from((1, 2)), max_size=3).map(tuple)


class LedgerAgainstBruteForce(RuleBasedStateMachine):
    """Who holds what, and how many bytes, is as a scan over everything says."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.bench = Bench(200)
        self.model = Model(200)
        self.waiters: dict[str, tuple[RecordingHolder, Waiter]] = {}
        self.count = 0

    def run(self, step: Callable[[], object]) -> None:
        async def stepping() -> None:
            step()

        self.loop.run_until_complete(stepping())

    def pick(self, items: list[str], number: int) -> str:
        return items[number % len(items)]

    @rule(tokens=tokens_of, nbytes=st.integers(0, 120), deliveries=st.integers(1, 2))
    def insert(self, tokens: tuple[int, ...], nbytes: int, deliveries: int) -> None:
        self.count += 1
        draft = draft_of(f"e{self.count}", tokens, nbytes, deliveries=deliveries)
        entry = StoredEntry(draft, 0)
        self.model.insert(ModelEntry(entry, deliveries))
        options = {"tokens": tokens, "nbytes": nbytes, "deliveries": deliveries}
        self.run(lambda: self.bench.begin(draft.entry_id, **options))

    @rule(tokens=st.none() | tokens_of.filter(bool))
    def select(self, tokens: tuple[int, ...] | None) -> None:
        self.count += 1
        name = f"q{self.count}"
        self.model.select(ModelQuery(name, tokens))
        query = make_query(tokens, None)

        def select() -> None:
            self.waiters[name] = self.bench.select(query, name)

        self.run(select)

    @precondition(lambda self: self.filling())
    @rule(number=st.integers(0, 100))
    def finish(self, number: int) -> None:
        name = self.pick(self.filling(), number)
        self.model.commit(self.model.entries[name])
        self.run(lambda: self.bench.finish(self.bench.ledger.entries[name]))

    def filling(self) -> list[str]:
        entries = self.model.entries.values()
        busy = ("filling", "direct")
        return [e.id for e in entries if e.state in busy and not e.is_whole]

    @precondition(lambda self: self.holding())
    @rule(number=st.integers(0, 100), acknowledge=st.booleans())
    def end(self, number: int, acknowledge: bool) -> None:
        name = self.pick(self.holding(), number)
        self.model.end(self.model.queries[name], acknowledged=acknowledge)
        holder, waiter = self.waiters.pop(name)
        if acknowledge:
            self.run(lambda: self.bench.ledger.acknowledge(holder.held()))
        else:
            self.run(lambda: self.bench.ledger.forget(waiter))

    def holding(self) -> list[str]:
        return [q.name for q in self.model.queries.values() if q.holds is not None]

    @precondition(lambda self: self.filling())
    @rule(number=st.integers(0, 100))
    def cancel_insert(self, number: int) -> None:
        name = self.pick(self.filling(), number)
        self.model.drop(self.model.entries[name])
        self.run(lambda: self.bench.ledger.forsake(self.bench.ledger.entries[name]))

    @precondition(lambda self: self.model.entries)
    @rule(number=st.integers(0, 100))
    def withdraw(self, number: int) -> None:
        entry = self.model.entries[self.pick(list(self.model.entries), number)]
        may = entry.state in ("waiting", "ready") and not entry.holders
        if may:
            self.model.drop(entry)

        def withdraw() -> None:
            assert self.bench.ledger.withdraw(entry.id) is may

        self.run(withdraw)

    @invariant()
    def is_as_the_scan_says(self) -> None:
        ledger = self.bench.ledger
        found = {n: holder.entry_id for n, (holder, _) in self.waiters.items()}
        assert found == {q.name: q.holds for q in self.model.queries.values()}
        states = {e.entry_id: e.state.name.lower() for e in ledger.entries.values()}
        assert states == {e.id: e.state for e in self.model.entries.values()}
        assert self.bench.arena.used_bytes == self.model.used()
        assert ledger.outside_bytes == self.model.outside()
        charged = sum(holder.charged_bytes for holder, _ in self.waiters.values())
        assert charged <= ledger.outside_bytes

    def teardown(self) -> None:
        def close() -> None:
            self.bench.room.closed = True
            self.bench.ledger.close()

        self.run(close)
        self.loop.close()
        assert self.bench.arena.used_bytes == self.bench.ledger.outside_bytes == 0
        assert self.bench.ledger.waiting_count == 0


TestLedgerAgainstBruteForce = LedgerAgainstBruteForce.TestCase
TestLedgerAgainstBruteForce.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None
)
