from __future__ import annotations

import asyncio

import pytest

from asynckv.buffers.entries.entries import StoredEntry
from asynckv.buffers.entries.ledger import Ledger
from asynckv.buffers.local.select import LocalSelect
from asynckv.errors import BufferClosed, EntryAborted, LeaseLost
from asynckv.tensors.arena import HeapArena
from asynckv.testing.blocked import until_blocked
from asynckv.transfers.queries import Query, make_query
from harness.holders import draft_of


class Bench:
    """A ledger and one local query of it."""

    def __init__(self, *, streams: bool = False) -> None:
        self.ledger = Ledger(HeapArena(1000), max_deliver=5, max_hold_s=None)
        query = make_query([1], None)
        self.holder = LocalSelect(self.ledger.leases, query, None, streams=streams)

    def begin(self, name: str, *, streaming: bool = False) -> StoredEntry:
        entry = self.ledger.table.admit(draft_of(name, streaming=streaming))
        self.ledger.give_room(entry)
        return entry

    def finish(self, entry: StoredEntry) -> None:
        self.ledger.landed(entry, 0, b"d")
        self.ledger.commit(entry)


def test_each_call_is_a_consumer_of_its_own() -> None:
    async def consumers() -> set[str]:
        return {Bench().holder.consumer for _ in range(3)}

    assert len(asyncio.run(consumers())) == 3


async def test_waits_for_an_entry_and_for_its_bytes() -> None:
    bench = Bench()
    whole = asyncio.create_task(bench.holder.lease())
    entry = bench.begin("a")
    await until_blocked(whole)
    bench.finish(entry)
    assert (await whole).entry is entry


async def test_waits_on_if_the_producer_fails() -> None:
    bench = Bench()
    whole = asyncio.create_task(bench.holder.lease())
    for name in ("a", "b"):
        entry = bench.begin(name)
        await until_blocked(whole)
        bench.ledger.forsake(entry)
    bench.finish(bench.begin("c"))
    assert (await whole).entry.entry_id == "c"


async def test_woken_cancelled_with_an_entry_in_hand_it_gives_it_back() -> None:
    bench = Bench()
    whole = asyncio.create_task(bench.holder.lease())
    await until_blocked(whole)
    bench.finish(bench.begin("a"))
    whole.cancel()
    await asyncio.wait({whole})
    bench.holder.give_back(failed=False)
    assert not bench.ledger.table.entries["a"].leases
    assert bench.ledger.leases.waiting_count == 0


async def test_closing_ends_the_wait() -> None:
    bench = Bench()
    whole = asyncio.create_task(bench.holder.lease())
    await until_blocked(whole)
    bench.begin("a")
    bench.ledger.close()
    with pytest.raises(BufferClosed):
        await whole


async def test_a_stream_is_shown_what_has_a_writer_or_is_whole() -> None:
    bench = Bench(streams=True)
    shown = asyncio.create_task(bench.holder.lease())
    whole = bench.begin("whole")
    await until_blocked(shown)
    assert not shown.done()
    bench.finish(whole)
    assert (await shown).entry is whole


async def test_a_stream_that_began_learns_that_its_producer_failed() -> None:
    bench = Bench(streams=True)
    entry = bench.begin("a", streaming=True)
    lease = await bench.holder.lease()
    bench.ledger.leases.reach(lease)
    landed = asyncio.create_task(bench.holder.landed(lease, 0))
    await until_blocked(landed)
    bench.ledger.abort_streaming(entry)
    with pytest.raises(EntryAborted, match="producer"):
        await landed


async def test_a_stream_that_did_not_begin_goes_back_to_waiting() -> None:
    bench = Bench(streams=True)
    shown = asyncio.create_task(bench.holder.lease())
    await until_blocked(shown)
    bench.ledger.abort_streaming(bench.begin("a", streaming=True))
    bench.begin("b", streaming=True)
    assert (await shown).entry.entry_id == "b"


async def test_a_delivery_that_was_taken_back_is_not_read_on() -> None:
    bench = Bench(streams=True)
    bench.begin("a", streaming=True)
    lease = await bench.holder.lease()
    bench.ledger.leases.give_back(lease, reached=False)
    with pytest.raises(LeaseLost):
        await bench.holder.landed(lease, 0)


async def test_a_cancelled_wait_is_not_remembered() -> None:
    bench = Bench()
    for _ in range(3):
        waiting = asyncio.create_task(bench.holder.lease())
        await until_blocked(waiting)
        waiting.cancel()
        await asyncio.wait({waiting})
    assert not bench.holder._watchers


async def test_a_failure_counts_only_if_the_application_had_it() -> None:
    for reached in (False, True):
        bench = Bench()
        entry = bench.begin("a")
        bench.finish(entry)
        if reached:
            bench.ledger.leases.reach(await bench.holder.lease())
        bench.holder.give_back(failed=True)
        assert entry.failures == reached


async def test_a_query_for_anything_is_logged_as_such(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("DEBUG", "asynckv.observability.waits")
    holder = LocalSelect(Bench().ledger.leases, Query(None), None, streams=False)
    waiting = asyncio.create_task(holder.lease())
    await until_blocked(waiting)
    assert "any tokens) waits for a match" in caplog.text
    waiting.cancel()
