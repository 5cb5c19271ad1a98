"""What an entry is, and what is known of entries, how much of it, and for how long."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
import torch

from asynckv import EntryAborted, EntryConflict, EntryTooLarge, LookupBuffer, TensorSpec
from asynckv.buffers.entries import table
from asynckv.buffers.entries.entries import (
    EntryState,
    Lease,
    StoredEntry,
    Waiter,
    make_draft,
)
from asynckv.buffers.entries.table import ExpiryClock, Tombstone, Tombstones
from asynckv.tensors.arena import HeapArena
from asynckv.testing import until
from asynckv.transfers.manifest import content_digest, layout_of
from asynckv.transfers.tokens import MAX_ID_LENGTH, Query, as_tokens, make_query
from harness.ledgers import RecordingHolder, SteppedLedger, draft_of

ONE = make_query([1], None)


async def test_time_is_judged_again_after_each_acknowledgement(
    bench: SteppedLedger,
) -> None:
    entry = bench.insert("a", deliveries=2, ttl_s=60)
    holder, _ = bench.select()
    entry.expires_at = 0.0  # its time ran out while it was held
    bench.leases.acknowledge(holder.held())
    assert bench.ledger.counters.expired == 1
    assert bench.arena.used_bytes == 0


@pytest.mark.parametrize("left_by", ["ttl", "withdrawn"])
async def test_sent_again_after_it_left_an_entry_goes_on_after_what_counted(
    bench: SteppedLedger, left_by: str
) -> None:
    entry = bench.insert("a", deliveries=2, ttl_s=60)
    if left_by == "ttl":
        entry.expires_at = 0.0
    bench.leases.acknowledge(bench.select(consumer="one")[0].held())
    if left_by == "withdrawn":
        bench.table.remove(entry, "withdrawn")
    again = bench.begin("a", deliveries=2)
    bench.table.resume(again, entry.digest())
    assert (again.attempts, again.deliveries_left) == (1, 1)
    assert again.consumers == {"one"}


async def test_what_counted_before_an_entry_was_sent_again_counts_for_ever(
    bench: SteppedLedger,
) -> None:
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


async def test_sent_again_what_failed_too_often_may_fail_as_often_again(
    bench: SteppedLedger,
) -> None:
    entry = bench.insert("a")
    while "a" in bench.table.entries:
        bench.leases.give_back(bench.select()[0].held(), reached=True)
    again = bench.begin("a")
    bench.table.resume(again, entry.digest())
    assert (again.attempts, again.failures) == (entry.attempts, 0)


async def test_an_entry_in_hand_does_not_expire(bench: SteppedLedger) -> None:
    bench.insert("a", ttl_s=0)
    bench.insert("b", tokens=(2,), ttl_s=0)
    holder, _ = bench.select()
    await until(lambda: "b" not in bench.table.entries)
    assert "a" in bench.table.entries
    bench.leases.give_back(holder.held(), reached=False)
    assert "a" not in bench.table.entries


async def test_what_an_id_stands_for_is_known_before_and_after_it_left(
    bench: SteppedLedger,
) -> None:
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


async def test_a_cancelled_insert_does_not_forget_how_the_id_left_before(
    bench: SteppedLedger,
) -> None:
    bench.insert("a")
    assert bench.ledger.withdraw("a")
    bench.ledger.forsake(bench.begin("a"))
    with pytest.raises(EntryAborted, match="withdrawn"):
        bench.table.when_gone("a")


async def test_a_cancelled_wait_for_the_end_is_forgotten(bench: SteppedLedger) -> None:
    entry = bench.insert("a")
    for _ in range(3):
        bench.table.when_gone("a").cancel()
    await asyncio.sleep(0)
    assert not entry.gone


async def test_who_waits_for_the_end_learns_of_an_acknowledgement(
    bench: SteppedLedger,
) -> None:
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


def test_many_that_are_too_old_are_forgotten_bit_by_bit() -> None:
    stones = Tombstones(max_age_s=10)
    for number in range(1000):
        stones.add(f"{number}", Tombstone("", b"", (), left_at=0.0))
    assert stones.find("999", now=11.0) is None
    assert 0 < len(stones) < 1000
    while stones:
        assert stones.find("999", now=11.0) is None


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
@pytest.mark.parametrize("entry_id", ["gone {}", "here"])
async def test_what_has_left_takes_no_place_for_long(
    bench: SteppedLedger, entry_id: str
) -> None:
    """Also if another entry has its id by now."""
    entry = bench.begin("here")
    clock = ExpiryClock(lambda entry_id: None, {"here": entry})
    for number in range(3000):
        entry.expires_at = asyncio.get_running_loop().time() + 600
        clock.add(entry.expires_at, entry_id.format(number))
    assert len(clock._due) + len(clock._to_sift) < 1400
    clock.stop()


class Looked(dict[str, StoredEntry]):
    """Entries by their ids; counts how often one was looked for."""

    count = 0

    def get(self, key: str, default: Any = None) -> Any:
        self.count += 1
        return super().get(key, default)


async def test_of_what_has_left_little_is_looked_at_in_one_turn() -> None:
    present, most = Looked(), 0
    clock, at = ExpiryClock(lambda entry_id: None, present), 600.0
    for number in range(5000):
        present.count = 0
        clock.add(asyncio.get_running_loop().time() + at, f"gone {number}")
        most = max(most, present.count)
    assert 0 < most < 10
    clock.stop()


async def test_what_is_there_is_due_in_order_while_what_has_left_is_sifted_out(
    bench: SteppedLedger,
) -> None:
    called, entry = list[str](), bench.begin("second")
    clock = ExpiryClock(called.append, {"second": entry})
    now = asyncio.get_running_loop().time()
    entry.expires_at = now + 0.01
    clock.add(now + 0.01, "second")
    for number in range(1024 + 3):
        clock.add(now + 600, f"gone {number}")
    clock.add(now, "first")
    clock.add(now + 0.02, "third")
    await until(lambda: len(called) == 3)
    assert called == ["first", "second", "third"]
    clock.stop()


@pytest.mark.both_loops
async def test_where_many_are_due_at_once_others_have_their_turn_in_between() -> None:
    called: list[str] = []
    others_turn = asyncio.get_running_loop().create_future()

    def expire(entry_id: str) -> None:
        called.append(entry_id)
        if len(called) == 1:
            loop.call_soon(lambda: others_turn.set_result(len(called)))

    clock, loop = ExpiryClock(expire, {}), asyncio.get_running_loop()
    now = loop.time()
    for number in range(1000):
        clock.add(now, f"{number}")
    assert await others_turn <= 128
    await until(lambda: len(called) == 1000)


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
    bench: SteppedLedger,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(table, "LEAST_ACCOUNT_BYTES", 1000)
    bench.insert("full", tokens=(9,))
    entry = bench.begin("a", streaming=True)
    bench.select(streams=True)
    assert entry.state is EntryState.STREAMING
    bench.room.change()
    assert not entry.in_arena
    bench.ledger.withdraw("full")
    assert entry.in_arena


async def test_outside_there_are_as_many_bytes_as_inside(bench: SteppedLedger) -> None:
    bench.insert("full", tokens=(9,), nbytes=92)
    assert bench.table.memory.may_place_outside(100)
    bench.begin("a", nbytes=50)
    bench.select()
    assert bench.table.memory.may_place_outside(42)
    assert not bench.table.memory.may_place_outside(43)


async def test_who_was_refused_bytes_outside_has_them_when_they_are_free_again(
    bench: SteppedLedger,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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
    bench: SteppedLedger, monkeypatch: pytest.MonkeyPatch, bound: str, most: int
) -> None:
    monkeypatch.setattr(table, bound, most)
    entries = [bench.begin(f"{n}", (), nbytes=0) for n in range(3)]
    filling, waiting = EntryState.FILLING, EntryState.WAITING
    assert [entry.state for entry in entries] == [filling, filling, waiting]
    bench.ledger.forsake(entries[1])
    assert entries[2].state is filling


def placed(tokens: torch.Tensor) -> StoredEntry:
    draft = msgspec.structs.replace(draft_of("it"), input_tokens=as_tokens(tokens))
    entry = StoredEntry(draft, 1)
    entry.place_regions(HeapArena(100).allocate(draft.layout.sizes) or [])
    entry.complete = True
    return entry


def test_tokens_are_copies_and_are_charged() -> None:
    tokens = torch.tensor([1, 2])
    entry = placed(tokens)
    tokens.fill_(9)
    assert entry.key() == torch.tensor([1, 2]).numpy().tobytes()
    assert ([region.nbytes for region in entry.regions], entry.nbytes) == ([8], 24)


def test_beginning_again_forgets_what_landed() -> None:
    entry = placed(torch.tensor([1, 2]))
    entry.parts[0].digest = b"d"
    entry.landed.append(0)
    entry.begin_again()
    assert not entry.complete
    assert entry.landed == []
    assert entry.parts[0].digest is None


def test_what_has_left_has_no_memory() -> None:
    entry = placed(torch.tensor([1, 2]))
    entry.drop_regions()
    assert entry.regions == ()
    assert entry.parts[0].region is None


def test_the_beginning_of_an_offer_is_kept_once_nothing_can_change() -> None:
    entry = placed(torch.tensor([1, 2]))
    assert entry.preamble() is entry.preamble()
    entry.begin_again()
    first = entry.preamble()
    entry.parts[0].digest = b"d"
    assert entry.preamble() != first


@pytest.mark.parametrize(
    ("nbytes", "tokens", "is_made"),
    [(8, 2, True), (64 * 1024, 2, True), (64 * 1024 + 1, 2, False), (8, 200, False)],
)
def test_the_beginning_of_a_small_offer_is_made_before_it_is_asked_for(
    nbytes: int, tokens: int, is_made: bool
) -> None:
    entry = StoredEntry(draft_of("it", tuple(range(tokens)), nbytes), 1)
    entry.make_complete()
    entry.parts[0].digest = b"other"
    assert (b"other" not in entry.preamble()) is is_made


@pytest.mark.parametrize(("parts", "is_made"), [(16, True), (17, False)])
def test_an_offer_of_many_parts_is_not_made_before_it_is_asked_for(
    parts: int, is_made: bool
) -> None:
    specs = {str(number): TensorSpec((0,), "uint8") for number in range(parts)}
    draft = msgspec.structs.replace(draft_of("it", (1, 2), 0), layout=layout_of(specs))
    entry = StoredEntry(draft, 1)
    entry.make_complete()
    entry.parts[0].digest = b"other"
    assert (b"other" not in entry.preamble()) is is_made


def test_the_digest_covers_tokens_and_tensors() -> None:
    digests = set()
    for tokens in ([1], [2]):
        for digest in (b"x", b"y"):
            entry = placed(torch.tensor(tokens))
            entry.parts[0].digest = digest
            digests.add(entry.digest())
            assert entry.digest() == content_digest(
                entry.draft.layout, [digest], entry.input_tokens, entry.roi
            )
    assert len(digests) == 4


def test_what_a_consumer_paid_is_given_back_once() -> None:
    holder = RecordingHolder()
    waiter = Waiter(Query(None), holder, 1, None)
    lease = Lease(StoredEntry(draft_of("it"), 1), waiter, 0, 1, b"token")
    lease.charge()
    assert holder.charged_bytes == 16
    for _ in range(2):
        lease.uncharge()
    assert holder.charged_bytes == 0


def test_a_lease_shows_neither_its_token_nor_the_prompt() -> None:
    waiter = Waiter(Query(b"prompt"), RecordingHolder(), 3, None)
    lease = Lease(StoredEntry(draft_of("it"), 1), waiter, 0, 1, b"token")
    assert (repr(lease), repr(waiter)) == ("<Lease 1 of entry it>", "<Waiter 3>")


SPECS = {"key": TensorSpec((3,), "float32")}


def test_a_draft_without_an_id_gets_one_of_its_own() -> None:
    drafts = [
        make_draft([1], [1], SPECS, entry_id=None, ttl_s=None, deliveries=1)
        for _ in range(2)
    ]
    assert len({draft.entry_id for draft in drafts}) == 2
    assert (drafts[0].layout.sizes, drafts[0].charged_bytes) == ((12,), 16)


@pytest.mark.parametrize(
    "wrong",
    [
        {"deliveries": 0},
        {"ttl_s": -1},
        {"ttl_s": float("inf")},
        {"entry_id": "x" * (MAX_ID_LENGTH + 1)},
    ],
)
def test_what_an_insert_says_is_checked(wrong: dict[str, Any]) -> None:
    options: dict[str, Any] = {"entry_id": None, "ttl_s": 1, "deliveries": 1} | wrong
    with pytest.raises(ValueError, match=next(iter(wrong))):
        make_draft([1], None, {}, **options)
