from __future__ import annotations

import asyncio
import logging

import pytest

from asynckv.buffers.entries.admission import Admission, Landed, check_not_aborted
from asynckv.buffers.entries.entries import EntryState, StoredEntry
from asynckv.errors import BufferClosed, EntryAborted
from asynckv.testing.blocked import until_blocked
from harness.holders import draft_of
from harness.ledgers import SteppedLedger

WAITING, FILLING = EntryState.WAITING, EntryState.FILLING


def full_bench() -> SteppedLedger:
    """Return one of 100 bytes that has no room until ``"full"`` leaves."""
    bench = SteppedLedger()
    bench.insert("full", tokens=(9,), nbytes=92)
    return bench


class Source:
    """Of an insert whose bytes are there at once."""

    async def fill(self, entry: StoredEntry, landed: Landed) -> None:
        landed(0, b"d")


def insert(bench: SteppedLedger, name: str, nbytes: int = 8) -> asyncio.Task[None]:
    draft = draft_of(name, nbytes=nbytes)
    return asyncio.create_task(Admission(bench.ledger).insert(draft, Source()))


async def test_who_comes_first_goes_first() -> None:
    bench = full_bench()
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
    bench = full_bench()
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
    bench = full_bench()
    bench.begin("a")
    bench.select()
    bench.ledger.withdraw("full")
    assert bench.begin("b").state is FILLING


async def test_what_began_outside_is_adopted_also_when_it_is_committed() -> None:
    for commits in (False, True):
        bench = full_bench()
        entry = bench.begin("a", streaming=True)
        bench.select(streams=True)
        if commits:
            bench.finish(entry)
        assert (entry in bench.room, entry.in_arena) == (True, False)
        bench.ledger.withdraw("full")
        assert (entry in bench.room, entry.in_arena) == (False, True)


async def test_a_cancelled_wait_leaves_the_line_to_the_next() -> None:
    bench = full_bench()
    first, second = insert(bench, "a", 92), insert(bench, "b")
    await until_blocked(first, second)
    first.cancel()
    await asyncio.wait({first})
    bench.ledger.withdraw("full")
    await second


async def test_closing_refuses_who_waits_and_who_comes() -> None:
    bench = full_bench()
    waiting = insert(bench, "a")
    await until_blocked(waiting)
    bench.ledger.refuse_inserts()
    for refused in (waiting, insert(bench, "b")):
        with pytest.raises(BufferClosed):
            await refused


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
    bench = full_bench()
    waiting = insert(bench, "1")
    await until_blocked(waiting)
    for _ in range(3):
        bench.room.change()
        await until_blocked(waiting)
    assert bench.room.longest_wait_s(asyncio.get_running_loop().time()) >= 0
    bench.ledger.withdraw("full")
    await waiting
    (message,) = caplog.messages
    assert message.startswith(
        "insert of 1 (16 bytes) waits for room in a buffer of 100 bytes; "
    )
    assert message.endswith("it ends with a drop_select, a withdraw or aclose")
