"""Room for inserts, and what becomes of them."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from asynckv.buffers.entries.admission import Admission, Landed, check_not_aborted
from asynckv.buffers.entries.entries import EntryState, StoredEntry
from asynckv.buffers.entries.ledger import Ledger
from asynckv.devices.arena import DeviceRegion
from asynckv.errors import BufferClosed, EntryAborted, EntryConflict, EntryTooLarge
from asynckv.tensors.arena import HeapArena, Region
from asynckv.testing.blocked import until_blocked
from asynckv.transfers.queries import make_query
from harness.holders import RecordingHolder, draft_of
from harness.ledgers import SteppedLedger

ONE = make_query([1], None)


class Bench:
    """Admission to 100 bytes, and a source whose bytes come when it is told."""

    def __init__(self) -> None:
        self.fills = 0
        self.may_fill = asyncio.Event()
        self.may_fill.set()
        self.arena = HeapArena(100)
        self.ledger = Ledger(self.arena, max_deliver=5, max_hold_s=None)
        self.room = self.ledger.room
        self.admission = Admission(self.ledger)

    async def fill(self, entry: StoredEntry, landed: Landed) -> None:
        self.fills += 1
        await self.may_fill.wait()
        landed(0, b"d")

    async def insert(
        self, name: str, nbytes: int = 80, digest: bytes | None = None, **draft: Any
    ) -> None:
        drawn = draft_of(name, nbytes=nbytes, **draft)
        await self.admission.insert(drawn, self, digest)

    async def started(self, name: str, **draft: Any) -> asyncio.Task[None]:
        task = asyncio.create_task(self.insert(name, **draft))
        await until_blocked(task)
        return task

    async def streamed(
        self, name: str
    ) -> tuple[StoredEntry, RecordingHolder, asyncio.Task[None]]:
        """Stream to a consumer what has no room, and wait for it to be admitted."""
        drawn = draft_of(name, nbytes=80, streaming=True)
        begin = asyncio.create_task(self.admission.begin(drawn))
        await until_blocked(begin)
        holder, entry = self.select(), await begin
        self.ledger.landed(entry, 0, b"d")
        finish = asyncio.create_task(self.admission.finish(entry))
        await until_blocked(finish)
        return entry, holder, finish

    def select(self, consumer: str = "consumer") -> RecordingHolder:
        holder = RecordingHolder(consumer)
        self.ledger.leases.select(ONE, holder, None)
        return holder


async def full_bench() -> Bench:
    """Return one that has no room for another entry."""
    bench = Bench()
    await bench.insert("full", tokens=(9,))
    return bench


async def test_given_back_to_another_it_sends_its_bytes_again() -> None:
    bench = await full_bench()
    insert = await bench.started("a")
    first, second = bench.select(), bench.select()
    await until_blocked(insert)
    bench.ledger.leases.give_back(first.held(), reached=False)
    await until_blocked(insert)
    assert (second.heard[-1], bench.fills) == ("completed", 3)
    bench.ledger.leases.acknowledge(second.held())
    await insert


async def test_acknowledged_before_its_bytes_came_it_sends_none() -> None:
    bench = await full_bench()
    insert = await bench.started("a")
    bench.ledger.leases.acknowledge(bench.select().held())
    await insert
    assert bench.fills == 1


async def test_cancelled_it_gives_its_room_to_the_next() -> None:
    bench = Bench()
    bench.may_fill.clear()
    first = await bench.started("a", tokens=(9,))
    second = await bench.started("b")
    first.cancel()
    bench.may_fill.set()
    await second
    assert list(bench.ledger.table.entries) == ["b"]


async def test_cancelled_with_a_consumer_it_is_that_consumers_alone() -> None:
    bench = await full_bench()
    insert = await bench.started("a")
    holder = bench.select()
    await until_blocked(insert)
    insert.cancel()
    await asyncio.wait({insert})
    bench.ledger.leases.acknowledge(holder.held())
    assert bench.ledger.table.memory.outside_bytes == 0


async def broken_off(bench: Bench, *, counts: bool) -> bytes:
    """Let an insert for two break off after its first delivery; return its digest."""
    await bench.insert("full", tokens=(9,))
    insert = await bench.started("a", deliveries=2)
    holder = bench.select("one")
    await until_blocked(insert)
    lease, digest = holder.held(), holder.held().entry.digest()
    if counts:
        bench.ledger.leases.acknowledge(lease)
    else:
        bench.ledger.leases.give_back(lease, reached=True)
    insert.cancel()
    await asyncio.wait({insert})
    return digest


async def test_sent_again_an_insert_goes_on_after_what_was_delivered() -> None:
    bench = Bench()
    digest = await broken_off(bench, counts=True)
    again = await bench.started("a", deliveries=2, digest=digest)
    assert bench.select("one").entry_id is None
    holder = bench.select("two")
    await until_blocked(again)
    assert holder.held().attempt == 2
    bench.ledger.leases.acknowledge(holder.held())
    await again
    assert "a" not in bench.ledger.table.entries


async def test_sent_again_its_failures_still_count() -> None:
    bench = Bench()
    digest = await broken_off(bench, counts=False)
    again = await bench.started("a", deliveries=2, digest=digest)
    lease = bench.select("one").held()
    assert (lease.attempt, lease.entry.failures) == (2, 1)
    again.cancel()


async def test_other_contents_under_its_id_begin_anew() -> None:
    bench = Bench()
    await broken_off(bench, counts=True)
    again = await bench.started("a", deliveries=2, digest=b"other")
    assert bench.select("one").held().attempt == 1
    again.cancel()


async def test_what_its_consumer_has_alone_does_not_stand_for_other_deliveries() -> (
    None
):
    bench = await full_bench()
    insert = await bench.started("a", deliveries=2)
    holder = bench.select("one")
    await until_blocked(insert)
    insert.cancel()
    await asyncio.wait({insert})
    digest = holder.held().entry.digest()
    bench.ledger.leases.acknowledge(holder.held())
    again = await bench.started("a", deliveries=2, digest=digest)
    assert bench.select("two").held().attempt == 2
    again.cancel()


async def test_an_insert_that_was_withdrawn_says_so() -> None:
    bench = await full_bench()
    insert = await bench.started("a")
    assert bench.ledger.withdraw("a")
    with pytest.raises(EntryAborted, match="withdrawn"):
        await insert


async def test_closing_refuses_those_who_wait_and_those_who_come() -> None:
    bench = await full_bench()
    insert = await bench.started("a")
    bench.ledger.refuse_inserts()
    for refused in (insert, bench.insert("b")):
        with pytest.raises(BufferClosed):
            await refused


async def test_closing_does_not_wait_for_who_holds_a_direct_delivery() -> None:
    bench = await full_bench()
    insert = await bench.started("a")
    holder = bench.select()
    await until_blocked(insert)
    bench.ledger.leases.reach(holder.held())
    bench.ledger.close()
    with pytest.raises(BufferClosed, match="holds the entry"):
        await insert
    bench.ledger.leases.acknowledge(holder.held())


async def test_a_stream_that_is_cancelled_before_it_began_leaves_no_trace() -> None:
    bench = await full_bench()
    drawn = draft_of("a", nbytes=80, streaming=True)
    begin = asyncio.create_task(bench.admission.begin(drawn))
    await until_blocked(begin)
    begin.cancel()
    await asyncio.wait({begin})
    assert list(bench.ledger.table.entries) == ["full"]
    assert len(bench.room) == 0
    assert bench.select().entry_id is None


async def test_a_stream_without_room_ends_when_it_moved_in() -> None:
    bench = await full_bench()
    entry, holder, finish = await bench.streamed("a")
    bench.ledger.leases.give_back(holder.held(), reached=True)
    await until_blocked(finish)
    assert not finish.done()
    bench.ledger.withdraw("full")
    await finish
    assert entry.in_arena


async def test_a_stream_that_can_have_no_room_any_more_says_so() -> None:
    bench = await full_bench()
    entry, holder, finish = await bench.streamed("a")
    bench.arena.max_bytes = 60  # memory was refused
    bench.room.change()
    with pytest.raises(EntryTooLarge):
        await finish
    assert holder.held().entry is entry and not entry.in_arena


async def test_an_insert_that_finds_no_memory_leaves_no_trace() -> None:
    bench = Bench()

    async def fill(entry: StoredEntry, landed: Landed) -> None:
        raise MemoryError

    bench.fill = fill  # type: ignore[method-assign]
    with pytest.raises(EntryTooLarge, match="no memory for 8"):
        await bench.insert("a")
    assert bench.arena.used_bytes == 0 and not bench.ledger.table.entries


def insert_nowait(
    bench: Bench, name: str, digest: bytes | None = None, nbytes: int = 80
) -> bool:
    pieces = [memoryview(bytes(nbytes))]
    drawn = draft_of(name, nbytes=nbytes)
    return bench.admission.insert_nowait(drawn, pieces, [b"d"], digest)


async def test_what_is_here_is_in_at_once_and_goes_to_who_waits() -> None:
    bench = Bench()
    holder = bench.select()
    assert insert_nowait(bench, "it")
    assert holder.entry_id == "it"
    assert holder.held().entry.state is EntryState.READY


async def test_what_is_here_but_has_no_room_leaves_no_trace() -> None:
    bench = await full_bench()
    assert not insert_nowait(bench, "it")
    assert [*bench.ledger.table.entries] == ["full"]
    assert not len(bench.room)


async def test_what_is_here_does_not_pass_who_waits_for_room() -> None:
    bench = await full_bench()
    waiting = await bench.started("first")
    assert not insert_nowait(bench, "second", nbytes=1)
    waiting.cancel()


async def test_what_is_here_again_is_in_once_and_of_other_contents_refused() -> None:
    bench = Bench()
    assert insert_nowait(bench, "it")
    digest = bench.ledger.table.entries["it"].digest()
    assert insert_nowait(bench, "it", digest)
    assert len(bench.ledger.table.entries) == 1
    with pytest.raises(EntryConflict):
        insert_nowait(bench, "it", b"other")


@pytest.mark.parametrize("error", [MemoryError(), ValueError("of another length")])
async def test_what_is_here_and_cannot_be_copied_leaves_no_trace(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench()

    def fails(nbytes: int) -> memoryview:
        raise error

    monkeypatch.setattr("asynckv.tensors.arena.heap_memory", fails)
    with pytest.raises((EntryTooLarge, ValueError)):
        insert_nowait(bench, "it")
    assert not bench.ledger.table.entries
    assert not bench.arena.used_bytes


async def test_what_is_here_waits_if_it_is_for_a_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench()
    monkeypatch.setattr(Region, "write", DeviceRegion.write)
    assert not insert_nowait(bench, "it")
    assert not bench.arena.used_bytes


WAITING, FILLING = EntryState.WAITING, EntryState.FILLING


def full_ledger() -> SteppedLedger:
    """Return one of 100 bytes that has no room until ``"full"`` leaves."""
    bench = SteppedLedger()
    bench.insert("full", tokens=(9,), nbytes=92)
    return bench


async def test_who_comes_first_goes_first() -> None:
    bench = full_ledger()
    entries = [bench.begin(name, nbytes=92) for name in "abc"]
    bench.ledger.withdraw("full")
    for count, entry in enumerate(entries, 1):
        assert entry.state is FILLING
        assert [e.state for e in entries].count(WAITING) == 3 - count
        bench.finish(entry)
        bench.ledger.withdraw(entry.entry_id)
    assert len(bench.room) == 0


async def test_nobody_passes_who_waits() -> None:
    bench = SteppedLedger()
    bench.insert("half", nbytes=42)
    first, second = bench.begin("a", nbytes=92), bench.begin("b", nbytes=0)
    assert (first.state, second.state) == (WAITING, WAITING)
    assert (first in bench.room, second in bench.room) == (True, True)


async def test_who_was_selected_meanwhile_lets_others_pass_in_its_place() -> None:
    bench = full_ledger()
    first, second = bench.begin("a", nbytes=92), bench.begin("b", tokens=(2,))
    holder, _ = bench.select()
    assert first.state is EntryState.DIRECT
    bench.ledger.withdraw("full")
    assert second.in_arena
    bench.finish(first)
    bench.leases.give_back(holder.held(), reached=False)
    third = bench.begin("c", tokens=(3,))
    bench.finish(second)
    bench.ledger.withdraw("b")
    assert (first.in_arena, third.in_arena) == (True, False)


async def test_who_passes_only_selected_ones_does_not_wait() -> None:
    bench = full_ledger()
    bench.begin("a")
    bench.select()
    bench.ledger.withdraw("full")
    assert bench.begin("b").state is FILLING


@pytest.mark.parametrize("commits", [False, True])
async def test_what_began_outside_moves_in_when_there_is_room(commits: bool) -> None:
    bench = full_ledger()
    entry = bench.begin("a", streaming=True)
    bench.select(streams=True)
    if commits:
        bench.finish(entry)
    assert (entry in bench.room, entry.in_arena) == (True, False)
    assert bench.table.memory.outside_bytes == 16
    bench.ledger.withdraw("full")
    assert (entry in bench.room, entry.in_arena) == (False, True)
    assert (bench.table.memory.outside_bytes, bench.arena.used_bytes) == (0, 16)


async def test_an_entry_that_left_tells_its_insert_how() -> None:
    entry = StoredEntry(draft_of("1"), 1)
    entry.state = EntryState.GONE
    check_not_aborted(entry)
    for reason, kind in (("withdrawn", EntryAborted), ("closed", BufferClosed)):
        entry.left_by = reason
        with pytest.raises(kind):
            check_not_aborted(entry)


async def test_a_wait_says_who_waits_for_how_much_of_what(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG, "asynckv.observability.waits")
    bench = await full_bench()
    waiting = await bench.started("1")
    for _ in range(3):
        bench.room.change()
        await until_blocked(waiting)
    assert bench.room.longest_wait_s(asyncio.get_running_loop().time()) >= 0
    bench.ledger.withdraw("full")
    await waiting
    (message,) = caplog.messages
    assert message.startswith(
        "insert of 1 (88 bytes) waits for room in a buffer of 100 bytes; "
    )
    assert message.endswith("it ends with a drop_select, a withdraw or aclose")
