"""What is known of entries, how much of it, and for how long."""

from __future__ import annotations

import asyncio

import pytest

from asynckv.buffers.entries import table
from asynckv.buffers.entries.entries import EntryState
from asynckv.buffers.entries.table import ExpiryClock, Tombstone, Tombstones
from asynckv.buffers.lookup import LookupBuffer
from asynckv.errors import EntryAborted, EntryConflict, EntryTooLarge
from asynckv.testing.blocked import until
from asynckv.transfers.queries import make_query
from harness.holders import RecordingHolder
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
    assert not bench.table.was_acknowledged("a", b"another")
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
    with pytest.raises(EntryConflict):
        bench.begin("a")
    bench.finish(entry)
    digest = bench.table.known_digest("a")
    assert digest == entry.digest()
    bench.leases.acknowledge(bench.select()[0].held())
    assert bench.table.known_digest("a") == digest
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


async def test_who_waits_for_the_end_learns_of_an_acknowledgement() -> None:
    bench = SteppedLedger()
    bench.insert("a")
    gone, cancelled = bench.table.when_gone("a"), bench.table.when_gone("a")
    cancelled.cancel()
    bench.leases.acknowledge(bench.select()[0].held())
    assert gone.result() is None


def stone(left_at: float, reason: str = "") -> Tombstone:
    return Tombstone(reason, b"", (), left_at)


def test_the_oldest_are_forgotten_by_count() -> None:
    stones = Tombstones(max_count=2)
    for number in range(3):
        stones.add(str(number), stone(0))
    assert len(stones) == 2
    assert stones.find("0", 0) is None
    assert stones.find("2", 0) is not None


def test_and_by_bytes_however_many_took_an_entry() -> None:
    one = Tombstone("", b"", (bytes(16),) * 9, 0, consumers=frozenset(("name" * 9,)))
    assert 512 + 9 * (16 + 33) < one.nbytes < 2048
    stones = Tombstones(max_bytes=3 * one.nbytes)
    for number in range(5):
        stones.add(str(number), one)
        stones.add(str(number), one)
    assert (len(stones), stones.nbytes) == (3, 3 * one.nbytes)
    assert stones.find("0", 601) is None
    assert (len(stones), stones.nbytes) == (0, 0)


def test_one_that_is_larger_than_all_may_be_is_not_remembered() -> None:
    stones = Tombstones(max_bytes=100)
    stones.add("a", stone(0))
    assert (len(stones), stones.nbytes) == (0, 0)


def test_and_by_age() -> None:
    stones = Tombstones(max_age_s=10)
    stones.add("old", stone(0))
    stones.add("new", stone(5))
    assert stones.find("old", 10) is not None
    assert stones.find("old", 11) is None
    assert stones.find("new", 11) is not None


def test_an_id_that_leaves_again_is_the_newest() -> None:
    stones = Tombstones(max_count=2)
    for name in ("a", "b", "a", "c"):
        stones.add(name, stone(0, name))
    assert stones.find("a", 0) is not None
    assert stones.find("b", 0) is None


@pytest.mark.both_loops
async def test_calls_in_order_of_time() -> None:
    called: list[str] = []
    clock = ExpiryClock(called.append, {})
    now = asyncio.get_running_loop().time()
    clock.add(now + 0.02, "later")
    clock.add(now, "now")
    clock.add(now + 0.01, "soon")
    await until(lambda: len(called) == 3)
    assert called == ["now", "soon", "later"]


@pytest.mark.both_loops
async def test_stopping_forgets_everything() -> None:
    called: list[str] = []
    clock = ExpiryClock(called.append, {})
    clock.add(asyncio.get_running_loop().time(), "it")
    clock.stop()
    other = ExpiryClock(called.append, {})
    other.add(asyncio.get_running_loop().time(), "other")
    await until(lambda: bool(called))
    assert called == ["other"]


@pytest.mark.both_loops
async def test_what_has_left_takes_no_place_for_long() -> None:
    present: dict[str, object] = {"here": 1}
    clock = ExpiryClock(lambda entry_id: None, present)
    for number in range(3000):
        clock.add(asyncio.get_running_loop().time() + 600, f"gone {number}")
    assert len(clock._due) < 1100
    clock.stop()


@pytest.mark.both_loops
async def test_a_call_may_add_another() -> None:
    called: list[str] = []

    def again(entry_id: str) -> None:
        called.append(entry_id)
        if len(called) < 3:
            clock.add(asyncio.get_running_loop().time(), entry_id)

    clock = ExpiryClock(again, {})
    clock.add(asyncio.get_running_loop().time(), "it")
    await until(lambda: len(called) == 3)


async def test_what_could_never_fit_is_refused() -> None:
    with pytest.raises(EntryTooLarge):
        SteppedLedger().begin("a", nbytes=93)


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


@pytest.mark.parametrize(
    ("bound", "most"), [("LEAST_ACCOUNT_BYTES", 8000), ("LEAST_ENTRIES", 2)]
)
async def test_entries_without_a_byte_wait_when_too_many_or_too_much_of_them_is_kept(
    monkeypatch: pytest.MonkeyPatch, bound: str, most: int
) -> None:
    monkeypatch.setattr(table, bound, most)
    bench = SteppedLedger()
    entries = [bench.begin(f"{n}", (), nbytes=0) for n in range(3)]
    filling, waiting = EntryState.FILLING, EntryState.WAITING
    assert [entry.state for entry in entries] == [filling, filling, waiting]
    bench.ledger.forsake(entries[1])
    assert entries[2].state is filling
