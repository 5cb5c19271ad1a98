"""Where the bytes of entries lie, and how much may be kept beside them."""

from __future__ import annotations

import asyncio

import pytest

from asynckv.buffers.entries import table
from asynckv.buffers.entries.entries import EntryState
from asynckv.buffers.lookup import LookupBuffer
from asynckv.errors import EntryTooLarge
from asynckv.testing.blocked import until
from asynckv.transfers.queries import make_query
from harness.holders import RecordingHolder
from harness.ledgers import SteppedLedger


async def test_what_could_never_fit_is_refused() -> None:
    with pytest.raises(EntryTooLarge):
        SteppedLedger().begin("a", nbytes=93)


async def test_entries_without_a_byte_wait_when_too_much_is_kept_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(table, "LEAST_ACCOUNT_BYTES", 8000)
    bench = SteppedLedger()
    entries = [bench.begin(f"{n}", (), nbytes=0) for n in range(3)]
    filling, waiting = EntryState.FILLING, EntryState.WAITING
    assert [entry.state for entry in entries] == [filling, filling, waiting]
    bench.ledger.forsake(entries[0])
    assert entries[2].state is filling


async def test_entries_are_bounded_in_number_whatever_they_hold(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(table, "LEAST_ENTRIES", 2)
    bench = SteppedLedger()
    entries = [bench.begin(f"{n}", (), nbytes=0) for n in range(3)]
    filling, waiting = EntryState.FILLING, EntryState.WAITING
    assert [entry.state for entry in entries] == [filling, filling, waiting]
    bench.ledger.forsake(entries[1])
    assert entries[2].state is filling


async def test_a_small_buffer_has_1024_entries_and_one_more_waits() -> None:
    async with LookupBuffer("1MiB", drain_s=0) as buffer:
        for _ in range(1024):
            await buffer.insert([1], None, None, None, None)
        more = asyncio.create_task(buffer.insert([2], None, None, None, None))
        await until(lambda: buffer.statistics().waiting_inserts == 1)
        await buffer.drop_select([1])
        await more


async def test_one_entry_of_very_many_tensors_has_room_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(table, "LEAST_ACCOUNT_BYTES", 1000)
    assert SteppedLedger().begin("it").state is EntryState.FILLING


async def test_what_began_outside_stays_there_while_too_much_is_kept_of_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(table, "LEAST_ACCOUNT_BYTES", 1000)
    bench = SteppedLedger()
    bench.insert("full", tokens=(9,))
    entry = bench.begin("a", streaming=True)
    bench.select(streams=True)
    assert entry.state is EntryState.STREAMING
    bench.room.change()
    assert not entry.in_arena
    bench.ledger.withdraw("full")
    assert entry.in_arena


async def test_outside_there_are_as_many_bytes_as_inside() -> None:
    bench = SteppedLedger()
    bench.insert("full", tokens=(9,), nbytes=92)
    assert bench.table.memory.may_place_outside(100)
    bench.begin("a", nbytes=50)
    bench.select()
    assert bench.table.memory.may_place_outside(42)
    assert not bench.table.memory.may_place_outside(43)


async def test_who_was_refused_bytes_outside_has_them_when_they_are_free_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = SteppedLedger()
    bench.insert("full", tokens=(9,), nbytes=92)
    for name, tokens in (("a", (1,)), ("b", (2,))):
        bench.begin(name, tokens, nbytes=50)
    first, _ = bench.select()
    second = RecordingHolder()
    monkeypatch.setattr(second, "may_charge", bench.table.memory.may_place_outside)
    bench.leases.select(make_query([2], None), second, None)
    assert second.entry_id is None
    bench.leases.acknowledge(first.held())
    await asyncio.sleep(0)
    assert second.entry_id == "b"
