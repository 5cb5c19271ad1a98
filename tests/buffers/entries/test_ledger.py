"""What is in a buffer, held against a scan over everything."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from asynckv.buffers.entries.entries import EntryState, StoredEntry, Waiter
from asynckv.errors import EntryAborted
from asynckv.testing import until
from asynckv.transfers.tokens import make_query
from harness.ledgers import RecordingHolder, SteppedLedger, draft_of

ONE = make_query([1], None)


async def test_a_consumer_whose_bound_is_full_gets_no_direct_delivery(
    full: SteppedLedger,
) -> None:
    full.begin("a", nbytes=50)
    holder = RecordingHolder(bound=57)
    full.leases.select(ONE, holder, None)
    assert holder.entry_id is None
    holder.bound = 58
    full.ledger.offer_waiting_soon()
    await asyncio.sleep(0)
    assert holder.entry_id == "a"


async def test_many_entries_that_wait_are_offered_in_turns_until_none_was_passed_over(
    full: SteppedLedger,
) -> None:
    holders = [RecordingHolder(bound=0) for _ in range(200)]
    for number, holder in enumerate(holders):
        full.begin(f"{number}", (number,), nbytes=50)
        full.leases.select(make_query([number], None), holder, None)
    for holder in holders[1:]:
        holder.bound = 100
    full.ledger.offer_waiting_soon()
    await asyncio.sleep(0)
    assert sum(holder.entry_id is not None for holder in holders) == 63
    holders[0].bound = 100
    full.ledger.offer_waiting_soon()
    await until(lambda: all(holder.entry_id is not None for holder in holders))


async def test_an_early_acknowledgement_does_not_restart_bytes_on_their_way(
    full: SteppedLedger,
) -> None:
    entry = full.begin("a", nbytes=50, deliveries=2)
    holder, _ = full.select(streams=True)
    region = entry.parts[0].region
    full.leases.acknowledge(holder.held())
    assert entry.parts[0].region is region
    full.finish(entry)
    assert entry.state is EntryState.WAITING
    assert full.table.memory.outside_bytes == 0


async def test_a_forsaken_direct_delivery_is_its_consumers_alone(
    full: SteppedLedger,
) -> None:
    entry = full.begin("a", nbytes=50)
    holder, _ = full.select()
    full.finish(entry)
    full.ledger.forsake(entry)
    assert full.table.is_undecided("a")
    assert full.select()[0].entry_id is None
    full.leases.give_back(holder.held(), reached=False)
    assert "a" not in full.table.entries
    assert full.table.memory.outside_bytes == 0


async def test_a_forsaken_stream_outside_is_its_consumers_alone(
    full: SteppedLedger,
) -> None:
    entry = full.begin("a", nbytes=50, streaming=True, deliveries=2)
    one, _ = full.select(consumer="one")
    two, _ = full.select(consumer="two")
    full.finish(entry)
    full.ledger.abort_streaming(entry)
    full.leases.acknowledge(one.held())
    full.leases.acknowledge(two.held())
    assert full.table.when_gone("a").done()
    assert full.table.memory.outside_bytes == 0


async def test_nobody_else_gets_a_stream_outside_that_its_writer_gave_up(
    full: SteppedLedger,
) -> None:
    entry = full.begin("a", nbytes=50, streaming=True, deliveries=2)
    holder, _ = full.select(consumer="one")
    full.finish(entry)
    full.ledger.abort_streaming(entry)
    assert full.select(consumer="two")[0].entry_id is None
    full.leases.give_back(holder.held(), reached=False)
    assert "a" not in full.table.entries
    assert full.table.memory.outside_bytes == 0


async def test_closing_ends_queries_and_what_no_application_holds() -> None:
    bench = SteppedLedger(1000)
    entry = bench.begin("filling")
    unreached, _ = bench.select()
    bench.insert("held", tokens=(2,))
    reached, _ = bench.select(make_query([2], None))
    bench.leases.reach(reached.held())
    waiting, _ = bench.select(make_query([3], None))
    bench.ledger.close()
    assert unreached.heard == ["leased filling", "retracted", "closed"]
    assert waiting.heard == ["closed"]
    assert entry.left_by == "closed"
    bench.leases.acknowledge(reached.held())
    assert bench.arena.used_bytes == 0


async def test_closing_leaves_an_entry_to_who_has_it_and_takes_it_from_others(
    bench: SteppedLedger,
) -> None:
    bench.insert("a", deliveries=2)
    has, _ = bench.select(consumer="has it")
    awaits, _ = bench.select(consumer="awaits it")
    bench.leases.reach(has.held())
    bench.ledger.close()
    assert awaits.heard == ["leased a", "retracted", "closed"]
    bench.leases.acknowledge(has.held())
    assert bench.arena.used_bytes == 0


async def test_after_closing_nothing_given_back_stays_and_nobody_waits(
    bench: SteppedLedger,
) -> None:
    bench.insert("held")
    gone = bench.table.when_gone("held")
    reached, _ = bench.select()
    bench.leases.reach(reached.held())
    bench.ledger.close()
    bench.leases.give_back(reached.held(), reached=True)
    with pytest.raises(EntryAborted, match="closed"):
        await gone
    assert bench.select()[0].heard == ["closed"]
    assert (bench.arena.used_bytes, bench.leases.waiting_count) == (0, 0)


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
        self.reselect(query)

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
        self.bench = SteppedLedger(200)
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
        self.run(
            lambda: self.bench.begin(
                draft.entry_id, tokens, nbytes, deliveries=deliveries
            )
        )

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
        self.run(lambda: self.bench.finish(self.bench.table.entries[name]))

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
            self.run(lambda: self.bench.leases.acknowledge(holder.held()))
        else:
            self.run(lambda: self.bench.leases.forget(waiter))

    def holding(self) -> list[str]:
        return [q.name for q in self.model.queries.values() if q.holds is not None]

    @precondition(lambda self: self.filling())
    @rule(number=st.integers(0, 100))
    def cancel_insert(self, number: int) -> None:
        name = self.pick(self.filling(), number)
        self.model.drop(self.model.entries[name])
        self.run(lambda: self.bench.ledger.forsake(self.bench.table.entries[name]))

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
        table = self.bench.table
        found = {n: holder.entry_id for n, (holder, _) in self.waiters.items()}
        assert found == {q.name: q.holds for q in self.model.queries.values()}
        states = {e.entry_id: e.state.name.lower() for e in table.entries.values()}
        assert states == {e.id: e.state for e in self.model.entries.values()}
        assert self.bench.arena.used_bytes == self.model.used()
        assert table.memory.outside_bytes == self.model.outside()
        charged = sum(holder.charged_bytes for holder, _ in self.waiters.values())
        assert charged <= table.memory.outside_bytes

    def teardown(self) -> None:
        def close() -> None:
            self.bench.ledger.close()

        self.run(close)
        self.loop.close()
        assert self.bench.arena.used_bytes == self.bench.table.memory.outside_bytes == 0
        assert self.bench.leases.waiting_count == 0


TestLedgerAgainstBruteForce = LedgerAgainstBruteForce.TestCase

TestLedgerAgainstBruteForce.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None
)
