from __future__ import annotations

import asyncio
from typing import Any

import pytest

from asynckv.buffers.admission import Admission, Landed
from asynckv.buffers.entries import EntryState, StoredEntry
from asynckv.buffers.ledger import Ledger
from asynckv.buffers.queries import make_query
from asynckv.buffers.room import Room
from asynckv.errors import BufferClosed, EntryAborted, EntryTooLarge
from asynckv.tensors.arena import HeapArena
from asynckv.testing.blocked import until_blocked
from asynckv.testing.holders import RecordingHolder, draft_of

ONE = make_query([1], None)


class Bench:
    """Admission to 100 bytes, and a source whose bytes come when it is told."""

    def __init__(self) -> None:
        self.fills = 0
        self.may_fill = asyncio.Event()
        self.may_fill.set()
        self.room = Room(lambda e: self.ledger.give_room(e), lambda e: self.adopt(e))
        self.ledger = Ledger(
            HeapArena(100), max_deliver=5, max_hold_s=None, changed=self.room.change
        )
        self.admission = Admission(self.ledger, self.room)

    def adopt(self, entry: StoredEntry) -> bool:
        return self.ledger.adopt(entry)

    async def fill(self, entry: StoredEntry, landed: Landed) -> None:
        self.fills += 1
        await self.may_fill.wait()
        landed(0, b"d")

    async def insert(self, name: str, nbytes: int = 80, **draft: Any) -> None:
        await self.admission.insert(draft_of(name, nbytes=nbytes, **draft), self)

    async def started(self, name: str, **draft: Any) -> asyncio.Task[None]:
        task = asyncio.create_task(self.insert(name, **draft))
        await until_blocked(task)
        return task

    def select(self) -> RecordingHolder:
        holder = RecordingHolder()
        self.ledger.leases.select(ONE, holder, None)
        return holder


async def test_an_insert_returns_when_it_is_committed() -> None:
    bench = Bench()
    await bench.insert("a")
    assert bench.ledger.book.entries["a"].state is EntryState.READY
    assert len(bench.room) == 0


async def test_without_room_it_returns_at_the_acknowledgement() -> None:
    bench = Bench()
    await bench.insert("full", tokens=(9,))
    insert = await bench.started("a")
    holder = bench.select()
    await until_blocked(insert)
    assert not insert.done()
    bench.ledger.leases.acknowledge(holder.held())
    await insert
    assert "a" not in bench.ledger.book.entries


async def test_given_back_to_another_it_sends_its_bytes_again() -> None:
    bench = Bench()
    await bench.insert("full", tokens=(9,))
    insert = await bench.started("a")
    first, second = bench.select(), bench.select()
    await until_blocked(insert)
    bench.ledger.leases.give_back(first.held(), reached=False)
    await until_blocked(insert)
    assert (second.heard[-1], bench.fills) == ("completed", 3)
    bench.ledger.leases.acknowledge(second.held())
    await insert


async def test_acknowledged_before_its_bytes_came_it_sends_none() -> None:
    bench = Bench()
    await bench.insert("full", tokens=(9,))
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
    assert list(bench.ledger.book.entries) == ["b"]


async def test_cancelled_with_a_consumer_it_is_that_consumers_alone() -> None:
    bench = Bench()
    await bench.insert("full", tokens=(9,))
    insert = await bench.started("a")
    holder = bench.select()
    await until_blocked(insert)
    insert.cancel()
    await asyncio.wait({insert})
    bench.ledger.leases.acknowledge(holder.held())
    assert bench.ledger.book.outside_bytes == 0


async def test_an_insert_that_was_withdrawn_says_so() -> None:
    bench = Bench()
    await bench.insert("full", tokens=(9,))
    insert = await bench.started("a")
    assert bench.ledger.withdraw("a")
    with pytest.raises(EntryAborted, match="withdrawn"):
        await insert


async def test_closing_refuses_those_who_wait_and_those_who_come() -> None:
    bench = Bench()
    await bench.insert("full", tokens=(9,))
    insert = await bench.started("a")
    await bench.room.aclose()
    for refused in (insert, bench.insert("b")):
        with pytest.raises(BufferClosed):
            await refused


async def test_closing_does_not_wait_for_who_holds_a_direct_delivery() -> None:
    bench = Bench()
    await bench.insert("full", tokens=(9,))
    insert = await bench.started("a")
    holder = bench.select()
    await until_blocked(insert)
    bench.ledger.leases.reach(holder.held())
    bench.ledger.close()
    with pytest.raises(BufferClosed, match="holds the entry"):
        await insert
    bench.ledger.leases.acknowledge(holder.held())


async def test_a_stream_without_room_ends_when_it_moved_in() -> None:
    bench = Bench()
    await bench.insert("full", tokens=(9,))
    begin = asyncio.create_task(
        bench.admission.begin(draft_of("a", nbytes=80, streaming=True))
    )
    await until_blocked(begin)
    holder = bench.select()
    entry = await begin
    bench.ledger.landed(entry, 0, b"d")
    finish = asyncio.create_task(bench.admission.finish(entry))
    await until_blocked(finish)
    bench.ledger.leases.give_back(holder.held(), reached=True)
    await until_blocked(finish)
    assert not finish.done()
    bench.ledger.withdraw("full")
    await finish
    assert entry.in_arena


async def test_what_could_never_fit_does_not_wait() -> None:
    with pytest.raises(EntryTooLarge):
        await Bench().insert("a", nbytes=93)
