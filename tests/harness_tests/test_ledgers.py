from __future__ import annotations

from asynckv.buffers.entries.entries import EntryState
from harness.ledgers import SteppedLedger


async def test_an_insert_goes_step_by_step() -> None:
    bench = SteppedLedger(16)
    assert bench.insert("a").state is EntryState.READY
    assert bench.begin("b").state is EntryState.WAITING
    assert bench.arena.used_bytes == 16


async def test_a_consumer_writes_down_what_it_gets() -> None:
    bench = SteppedLedger()
    holder, waiter = bench.select()
    bench.insert("a")
    assert holder.heard == ["leased a", "landed 0", "completed"]
    assert waiter.lease is holder.held()
