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
from asynckv.testing.lookup_checks.values import cancelled, started
from asynckv.transfers.tokens import make_query
from harness.ledgers import RecordingHolder, SteppedLedger, draft_of

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
        return await started(self.insert(name, **draft))

    async def streamed(
        self, name: str
    ) -> tuple[StoredEntry, RecordingHolder, asyncio.Task[None]]:
        """Stream to a consumer what has no room, and wait for it to be admitted."""
        drawn = draft_of(name, nbytes=80, streaming=True)
        begin = await started(self.admission.begin(drawn))
        holder, entry = self.select(), await begin
        self.ledger.landed(entry, 0, b"d")
        finish = await started(self.admission.finish(entry))
        return entry, holder, finish

    def select(self, consumer: str = "consumer") -> RecordingHolder:
        holder = RecordingHolder(consumer)
        self.ledger.leases.select(ONE, holder, None)
        return holder


@pytest.fixture
async def bench() -> Bench:
    return Bench()


@pytest.fixture
async def full_bench(bench: Bench) -> Bench:
    """One that has no room for another entry."""
    await bench.insert("full", tokens=(9,))
    return bench


async def test_given_back_to_another_it_sends_its_bytes_again(
    full_bench: Bench,
) -> None:
    insert = await full_bench.started("a")
    first, second = full_bench.select(), full_bench.select()
    await until_blocked(insert)
    full_bench.ledger.leases.give_back(first.held(), reached=False)
    await until_blocked(insert)
    assert (second.heard[-1], full_bench.fills) == ("completed", 3)
    full_bench.ledger.leases.acknowledge(second.held())
    await insert


async def test_acknowledged_before_its_bytes_came_it_sends_none(
    full_bench: Bench,
) -> None:
    insert = await full_bench.started("a")
    full_bench.ledger.leases.acknowledge(full_bench.select().held())
    await insert
    assert full_bench.fills == 1


async def test_cancelled_it_gives_its_room_to_the_next(bench: Bench) -> None:
    bench.may_fill.clear()
    first = await bench.started("a", tokens=(9,))
    second = await bench.started("b")
    first.cancel()
    bench.may_fill.set()
    await second
    assert list(bench.ledger.table.entries) == ["b"]


async def test_cancelled_with_a_consumer_it_is_that_consumers_alone(
    full_bench: Bench,
) -> None:
    insert = await full_bench.started("a")
    holder = full_bench.select()
    await until_blocked(insert)
    await cancelled(insert)
    full_bench.ledger.leases.acknowledge(holder.held())
    assert full_bench.ledger.table.memory.outside_bytes == 0


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
    await cancelled(insert)
    return digest


async def test_sent_again_an_insert_goes_on_after_what_was_delivered(
    bench: Bench,
) -> None:
    digest = await broken_off(bench, counts=True)
    again = await bench.started("a", deliveries=2, digest=digest)
    assert bench.select("one").entry_id is None
    holder = bench.select("two")
    await until_blocked(again)
    assert holder.held().attempt == 2
    bench.ledger.leases.acknowledge(holder.held())
    await again
    assert "a" not in bench.ledger.table.entries


async def test_sent_again_its_failures_still_count(bench: Bench) -> None:
    digest = await broken_off(bench, counts=False)
    again = await bench.started("a", deliveries=2, digest=digest)
    lease = bench.select("one").held()
    assert (lease.attempt, lease.entry.failures) == (2, 1)
    again.cancel()


async def test_other_contents_under_its_id_begin_anew(bench: Bench) -> None:
    await broken_off(bench, counts=True)
    again = await bench.started("a", deliveries=2, digest=b"other")
    assert bench.select("one").held().attempt == 1
    again.cancel()


async def test_what_its_consumer_has_alone_does_not_stand_for_other_deliveries(
    full_bench: Bench,
) -> None:
    insert = await full_bench.started("a", deliveries=2)
    holder = full_bench.select("one")
    await until_blocked(insert)
    await cancelled(insert)
    digest = holder.held().entry.digest()
    full_bench.ledger.leases.acknowledge(holder.held())
    again = await full_bench.started("a", deliveries=2, digest=digest)
    assert full_bench.select("two").held().attempt == 2
    again.cancel()


async def test_an_insert_that_was_withdrawn_says_so(full_bench: Bench) -> None:
    insert = await full_bench.started("a")
    assert full_bench.ledger.withdraw("a")
    with pytest.raises(EntryAborted, match="withdrawn"):
        await insert


async def test_closing_refuses_those_who_wait_and_those_who_come(
    full_bench: Bench,
) -> None:
    insert = await full_bench.started("a")
    full_bench.ledger.refuse_inserts()
    for refused in (insert, full_bench.insert("b")):
        with pytest.raises(BufferClosed):
            await refused


async def test_closing_does_not_wait_for_who_holds_a_direct_delivery(
    full_bench: Bench,
) -> None:
    insert = await full_bench.started("a")
    holder = full_bench.select()
    await until_blocked(insert)
    full_bench.ledger.leases.reach(holder.held())
    full_bench.ledger.close()
    with pytest.raises(BufferClosed, match="holds the entry"):
        await insert
    full_bench.ledger.leases.acknowledge(holder.held())


async def test_a_stream_that_is_cancelled_before_it_began_leaves_no_trace(
    full_bench: Bench,
) -> None:
    drawn = draft_of("a", nbytes=80, streaming=True)
    begin = await started(full_bench.admission.begin(drawn))
    await cancelled(begin)
    assert list(full_bench.ledger.table.entries) == ["full"]
    assert len(full_bench.room) == 0
    assert full_bench.select().entry_id is None


async def test_behind_others_too_who_is_cancelled_leaves_the_line(
    full_bench: Bench,
) -> None:
    first = await full_bench.started("first")
    stream = full_bench.admission.begin(draft_of("a", nbytes=80, streaming=True))
    for behind in (full_bench.insert("b"), stream):
        await cancelled(await started(behind))
    assert [entry.entry_id for entry in full_bench.room] == ["first"]
    first.cancel()


async def test_behind_others_too_who_is_acknowledged_leaves_the_line(
    full_bench: Bench,
) -> None:
    first = await full_bench.started("first", tokens=(9,))
    insert = await full_bench.started("a")
    full_bench.ledger.leases.acknowledge(full_bench.select().held())
    await insert
    _, holder, finish = await full_bench.streamed("b")
    full_bench.ledger.leases.acknowledge(holder.held())
    await finish
    assert [entry.entry_id for entry in full_bench.room] == ["first"]
    first.cancel()


async def test_a_stream_that_was_given_up_without_room_holds_nobody_up(
    full_bench: Bench,
) -> None:
    *_, finish = await full_bench.streamed("a")
    second = await full_bench.started("b", tokens=(9,))
    await cancelled(finish)
    full_bench.ledger.withdraw("full")
    await second


async def test_a_stream_without_room_ends_when_it_moved_in(full_bench: Bench) -> None:
    entry, holder, finish = await full_bench.streamed("a")
    full_bench.ledger.leases.give_back(holder.held(), reached=True)
    await until_blocked(finish)
    assert not finish.done()
    full_bench.ledger.withdraw("full")
    await finish
    assert entry.in_arena


async def test_a_stream_that_can_have_no_room_any_more_says_so(
    full_bench: Bench,
) -> None:
    entry, holder, finish = await full_bench.streamed("a")
    full_bench.arena.max_bytes = 60  # memory was refused
    full_bench.room.change()
    with pytest.raises(EntryTooLarge):
        await finish
    assert holder.held().entry is entry and not entry.in_arena


async def test_an_insert_that_finds_no_memory_leaves_no_trace(bench: Bench) -> None:

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


async def test_what_is_here_is_in_at_once_and_goes_to_who_waits(bench: Bench) -> None:
    holder = bench.select()
    assert insert_nowait(bench, "it")
    assert holder.entry_id == "it"
    assert holder.held().entry.state is EntryState.READY


async def test_what_is_here_but_has_no_room_leaves_no_trace(full_bench: Bench) -> None:
    assert not insert_nowait(full_bench, "it")
    assert [*full_bench.ledger.table.entries] == ["full"]
    assert not len(full_bench.room)


async def test_what_is_here_does_not_pass_who_waits_for_room(full_bench: Bench) -> None:
    waiting = await full_bench.started("first")
    assert not insert_nowait(full_bench, "second", nbytes=1)
    waiting.cancel()


async def test_what_is_here_again_is_in_once_and_of_other_contents_refused(
    bench: Bench,
) -> None:
    assert insert_nowait(bench, "it")
    digest = bench.ledger.table.entries["it"].digest()
    assert insert_nowait(bench, "it", digest)
    assert len(bench.ledger.table.entries) == 1
    with pytest.raises(EntryConflict):
        insert_nowait(bench, "it", b"other")


@pytest.mark.parametrize("error", [MemoryError(), ValueError("of another length")])
async def test_what_is_here_and_cannot_be_copied_leaves_no_trace(
    bench: Bench, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:

    def fails(nbytes: int) -> memoryview:
        raise error

    monkeypatch.setattr("asynckv.tensors.arena.heap_memory", fails)
    with pytest.raises((EntryTooLarge, ValueError)):
        insert_nowait(bench, "it")
    assert not bench.ledger.table.entries
    assert not bench.arena.used_bytes


async def test_what_is_here_waits_if_it_is_for_a_gpu(
    bench: Bench,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Region, "write", DeviceRegion.write)
    assert not insert_nowait(bench, "it")
    assert not bench.arena.used_bytes


WAITING, FILLING = EntryState.WAITING, EntryState.FILLING


async def test_who_comes_first_goes_first(full: SteppedLedger) -> None:
    entries = [full.begin(name, nbytes=92) for name in "abc"]
    full.ledger.withdraw("full")
    for count, entry in enumerate(entries, 1):
        assert entry.state is FILLING
        assert [e.state for e in entries].count(WAITING) == 3 - count
        full.finish(entry)
        full.ledger.withdraw(entry.entry_id)
    assert len(full.room) == 0


async def test_nobody_passes_who_waits() -> None:
    bench = SteppedLedger()
    bench.insert("half", nbytes=42)
    first, second = bench.begin("a", nbytes=92), bench.begin("b", nbytes=0)
    assert (first.state, second.state) == (WAITING, WAITING)
    assert (first in bench.room, second in bench.room) == (True, True)


async def test_who_was_selected_meanwhile_lets_others_pass_in_its_place(
    full: SteppedLedger,
) -> None:
    first, second = full.begin("a", nbytes=92), full.begin("b", tokens=(2,))
    holder, _ = full.select()
    assert first.state is EntryState.DIRECT
    full.ledger.withdraw("full")
    assert second.in_arena
    full.finish(first)
    full.leases.give_back(holder.held(), reached=False)
    third = full.begin("c", tokens=(3,))
    full.finish(second)
    full.ledger.withdraw("b")
    assert (first.in_arena, third.in_arena) == (True, False)


async def test_who_passes_only_selected_ones_does_not_wait(full: SteppedLedger) -> None:
    full.begin("a")
    full.select()
    full.ledger.withdraw("full")
    assert full.begin("b").state is FILLING


@pytest.mark.parametrize("commits", [False, True])
async def test_what_began_outside_moves_in_when_there_is_room(
    full: SteppedLedger, commits: bool
) -> None:
    entry = full.begin("a", streaming=True)
    full.select(streams=True)
    if commits:
        full.finish(entry)
    assert (entry in full.room, entry.in_arena) == (True, False)
    assert full.table.memory.outside_bytes == 16
    full.ledger.withdraw("full")
    assert (entry in full.room, entry.in_arena) == (False, True)
    assert (full.table.memory.outside_bytes, full.arena.used_bytes) == (0, 16)


async def test_an_entry_that_left_tells_its_insert_how() -> None:
    entry = StoredEntry(draft_of("1"), 1)
    entry.state = EntryState.GONE
    check_not_aborted(entry)
    for reason, kind in (("withdrawn", EntryAborted), ("closed", BufferClosed)):
        entry.left_by = reason
        with pytest.raises(kind):
            check_not_aborted(entry)


async def test_a_wait_says_who_waits_for_how_much_of_what(
    full_bench: Bench,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG, "asynckv.observability.waits")
    waiting = await full_bench.started("1")
    for _ in range(3):
        full_bench.room.change()
        await until_blocked(waiting)
    assert full_bench.room.longest_wait_s(asyncio.get_running_loop().time()) >= 0
    full_bench.ledger.withdraw("full")
    await waiting
    (message,) = caplog.messages
    assert message.startswith(
        "insert of 1 (88 bytes) waits for room in a buffer of 100 bytes; "
    )
    assert message.endswith("it ends with a drop_select, a withdraw or aclose")
