from __future__ import annotations

import asyncio

import pytest

from asynckv.errors import EntryAborted, EntryConflict
from asynckv.testing.blocked import until
from asynckv.transfers.queries import make_query
from harness.ledgers import SteppedLedger

ONE = make_query([1], None)


async def test_time_is_judged_again_after_each_acknowledgement() -> None:
    bench = SteppedLedger()
    entry = bench.insert("a", deliveries=2, ttl_s=60)
    holder, _ = bench.select()
    entry.expires_at = 0.0  # its time ran out while it was held
    bench.leases.acknowledge(holder.held())
    assert bench.ledger.counters.expired == 1
    assert bench.arena.used_bytes == 0


async def test_sent_again_after_its_time_an_entry_goes_on_after_what_counted() -> None:
    bench = SteppedLedger()
    entry = bench.insert("a", deliveries=2, ttl_s=60)
    entry.expires_at = 0.0
    bench.leases.acknowledge(bench.select(consumer="one")[0].held())
    again = bench.begin("a", deliveries=2)
    bench.table.resume(again, entry.digest())
    assert (again.attempts, again.deliveries_left) == (1, 1)
    assert again.consumers == {"one"}


async def test_what_counted_before_an_entry_was_sent_again_counts_for_ever() -> None:
    bench = SteppedLedger()
    entry = bench.insert("a", deliveries=2, ttl_s=60)
    entry.expires_at = 0.0
    lease = bench.select(consumer="one")[0].held()
    assert not bench.table.was_acknowledged("a", lease.token)
    bench.leases.acknowledge(lease)
    assert bench.table.was_acknowledged("a", lease.token)
    again = bench.begin("a", deliveries=2)
    bench.table.resume(again, entry.digest())
    assert bench.table.was_acknowledged("a", lease.token)
    bench.finish(again)
    bench.leases.acknowledge(bench.select(consumer="two")[0].held())
    assert bench.table.was_acknowledged("a", lease.token)


async def test_sent_again_what_failed_too_often_may_fail_as_often_again() -> None:
    bench = SteppedLedger()
    entry = bench.insert("a")
    while "a" in bench.table.entries:
        bench.leases.give_back(bench.select()[0].held(), reached=True)
    again = bench.begin("a")
    bench.table.resume(again, entry.digest())
    assert (again.attempts, again.failures) == (entry.attempts, 0)


async def test_what_was_withdrawn_goes_on_as_well_if_it_is_sent_again() -> None:
    bench = SteppedLedger()
    entry = bench.insert("a", deliveries=2)
    bench.leases.acknowledge(bench.select(consumer="one")[0].held())
    bench.table.leave(entry, "withdrawn")
    again = bench.begin("a", deliveries=2)
    bench.table.resume(again, entry.digest())
    assert (again.deliveries_left, again.consumers) == (1, {"one"})


async def test_an_entry_in_hand_does_not_expire() -> None:
    bench = SteppedLedger()
    bench.insert("a", ttl_s=0)
    bench.insert("b", tokens=(2,), ttl_s=0)
    holder, _ = bench.select()
    await until(lambda: "b" not in bench.table.entries)
    assert "a" in bench.table.entries
    bench.leases.give_back(holder.held(), reached=False)
    assert "a" not in bench.table.entries


async def test_what_an_id_stands_for_is_known_before_and_after_it_left() -> None:
    bench = SteppedLedger()
    assert bench.table.known_digest("a") is None
    entry = bench.begin("a")
    assert bench.table.known_digest("a") is None
    bench.finish(entry)
    digest = bench.table.known_digest("a")
    assert digest == entry.digest()
    bench.leases.acknowledge(bench.select()[0].held())
    assert bench.table.known_digest("a") == digest
    with pytest.raises(EntryConflict):
        bench.begin("a")


async def test_an_id_cannot_be_inserted_twice_at_a_time() -> None:
    bench = SteppedLedger()
    bench.begin("a")
    with pytest.raises(EntryConflict):
        bench.begin("a")


async def test_a_cancelled_insert_does_not_forget_how_the_id_left_before() -> None:
    bench = SteppedLedger()
    bench.insert("a")
    assert bench.ledger.withdraw("a")
    bench.ledger.forsake(bench.begin("a"))
    with pytest.raises(EntryAborted, match="withdrawn"):
        bench.table.when_gone("a")


async def test_a_cancelled_wait_for_the_end_is_forgotten() -> None:
    bench = SteppedLedger()
    entry = bench.insert("a")
    for _ in range(3):
        bench.table.when_gone("a").cancel()
    await asyncio.sleep(0)
    assert not entry.gone


async def test_which_deliveries_counted_is_remembered() -> None:
    bench = SteppedLedger()
    bench.insert("a")
    lease = bench.select()[0].held()
    assert not bench.table.was_acknowledged("a", lease.token)
    bench.leases.acknowledge(lease)
    assert bench.table.was_acknowledged("a", lease.token)
    assert not bench.table.was_acknowledged("a", b"another")


async def test_who_waits_for_the_end_learns_of_an_acknowledgement() -> None:
    bench = SteppedLedger()
    bench.insert("a")
    gone, cancelled = bench.table.when_gone("a"), bench.table.when_gone("a")
    cancelled.cancel()
    bench.leases.acknowledge(bench.select()[0].held())
    assert gone.result() is None
