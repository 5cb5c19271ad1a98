from __future__ import annotations

import asyncio

import pytest

from asynckv.buffers.entries.entries import EntryState
from asynckv.errors import EntryAborted
from asynckv.transfers.queries import make_query
from harness.holders import RecordingHolder
from harness.ledgers import SteppedLedger

ONE = make_query([1], None)


async def test_a_failed_insert_leaves_no_trace_and_its_query_keeps_its_place() -> None:
    bench = SteppedLedger()
    entry = bench.begin("a")
    first, _ = bench.select()
    second, _ = bench.select()
    bench.ledger.forsake(entry)
    assert first.heard == ["leased a", "retracted"]
    bench.insert("b")
    assert (first.entry_id, second.entry_id) == ("b", None)
    with pytest.raises(KeyError):
        bench.table.when_gone("a")


async def test_an_entry_without_room_goes_straight_to_who_selects_it() -> None:
    bench = SteppedLedger()
    bench.insert("full", tokens=(9,), nbytes=90)
    entry = bench.begin("a", nbytes=50)
    holder, _ = bench.select()
    assert entry.state is EntryState.DIRECT
    assert (bench.table.memory.outside_bytes, holder.charged_bytes) == (58, 58)
    bench.finish(entry)
    bench.leases.acknowledge(holder.held())
    assert (bench.table.memory.outside_bytes, holder.charged_bytes) == (0, 0)


async def test_a_consumer_whose_bound_is_full_gets_no_direct_delivery() -> None:
    bench = SteppedLedger()
    bench.insert("full", tokens=(9,), nbytes=90)
    bench.begin("a", nbytes=50)
    holder = RecordingHolder(bound=57)
    bench.leases.select(ONE, holder, None)
    assert holder.entry_id is None
    holder.bound = 58
    bench.ledger.offer_waiting_soon()
    await asyncio.sleep(0)
    assert holder.entry_id == "a"


async def test_a_direct_delivery_given_back_begins_again_for_the_next() -> None:
    bench = SteppedLedger()
    bench.insert("full", tokens=(9,), nbytes=90)
    entry = bench.begin("a", nbytes=50)
    first, _ = bench.select()
    second, _ = bench.select()
    bench.finish(entry)
    bench.leases.give_back(first.held(), reached=True)
    assert second.entry_id == "a"
    assert entry.state is EntryState.DIRECT
    assert not entry.complete
    assert bench.table.memory.outside_bytes == 58


async def test_an_early_acknowledgement_does_not_restart_bytes_on_their_way() -> None:
    bench = SteppedLedger()
    bench.insert("full", tokens=(9,), nbytes=90)
    entry = bench.begin("a", nbytes=50, deliveries=2)
    holder, _ = bench.select(streams=True)
    region = entry.parts[0].region
    bench.leases.acknowledge(holder.held())
    assert entry.parts[0].region is region
    bench.finish(entry)
    assert entry.state is EntryState.WAITING
    assert bench.table.memory.outside_bytes == 0


async def test_a_forsaken_direct_delivery_is_its_consumers_alone() -> None:
    bench = SteppedLedger()
    bench.insert("full", tokens=(9,), nbytes=90)
    entry = bench.begin("a", nbytes=50)
    holder, _ = bench.select()
    bench.finish(entry)
    bench.ledger.forsake(entry)
    assert bench.table.is_undecided("a")
    assert bench.select()[0].entry_id is None
    bench.leases.give_back(holder.held(), reached=False)
    assert "a" not in bench.table.entries
    assert bench.table.memory.outside_bytes == 0


async def test_a_forsaken_stream_outside_is_its_consumers_alone() -> None:
    bench = SteppedLedger()
    bench.insert("full", tokens=(9,), nbytes=90)
    entry = bench.begin("a", nbytes=50, streaming=True, deliveries=2)
    one, _ = bench.select(consumer="one")
    two, _ = bench.select(consumer="two")
    bench.finish(entry)
    bench.ledger.abort_streaming(entry)
    bench.leases.acknowledge(one.held())
    bench.leases.acknowledge(two.held())
    assert bench.table.when_gone("a").done()
    assert bench.table.memory.outside_bytes == 0


async def test_nobody_else_gets_a_stream_outside_that_its_writer_gave_up() -> None:
    bench = SteppedLedger()
    bench.insert("full", tokens=(9,), nbytes=90)
    entry = bench.begin("a", nbytes=50, streaming=True, deliveries=2)
    holder, _ = bench.select(consumer="one")
    bench.finish(entry)
    bench.ledger.abort_streaming(entry)
    assert bench.select(consumer="two")[0].entry_id is None
    bench.leases.give_back(holder.held(), reached=False)
    assert "a" not in bench.table.entries
    assert bench.table.memory.outside_bytes == 0


async def test_a_stream_that_began_outside_moves_in_when_there_is_room() -> None:
    bench = SteppedLedger()
    full = bench.insert("full", tokens=(9,), nbytes=80)
    entry = bench.begin("a", nbytes=50, streaming=True)
    holder, _ = bench.select()
    bench.finish(entry)
    bench.leases.give_back(holder.held(), reached=False)
    assert bench.table.memory.outside_bytes == 58
    assert bench.ledger.withdraw(full.entry_id)
    assert entry.in_arena
    assert (bench.table.memory.outside_bytes, bench.arena.used_bytes) == (0, 58)


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


async def test_closing_ends_a_stream_that_an_application_reads() -> None:
    bench = SteppedLedger()
    bench.insert("read")
    stream, _ = bench.select(streams=True)
    bench.leases.reach(stream.held())
    bench.ledger.close()
    assert stream.heard[-1] == "aborted closed"
    assert bench.arena.used_bytes == 0


async def test_closing_leaves_an_entry_to_who_has_it_and_takes_it_from_others() -> None:
    bench = SteppedLedger()
    bench.insert("a", deliveries=2)
    has, _ = bench.select(consumer="has it")
    awaits, _ = bench.select(consumer="awaits it")
    bench.leases.reach(has.held())
    bench.ledger.close()
    assert awaits.heard == ["leased a", "retracted", "closed"]
    bench.leases.acknowledge(has.held())
    assert bench.arena.used_bytes == 0


async def test_what_somebody_holds_cannot_be_withdrawn() -> None:
    bench = SteppedLedger()
    bench.insert("a")
    holder, _ = bench.select()
    assert not bench.ledger.withdraw("a")
    bench.leases.give_back(holder.held(), reached=False)
    assert bench.ledger.withdraw("a") and not bench.ledger.withdraw("a")


async def test_after_closing_nothing_given_back_stays_and_nobody_waits() -> None:
    bench = SteppedLedger()
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
