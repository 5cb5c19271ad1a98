"""What a consumer in this process waits for, takes, borrows and is handed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from typing import Any

import pytest
import torch

from asynckv import EntryAborted, KVEntry, LeaseLost, LookupBuffer, TensorSpec
from asynckv.buffers.entries.entries import Lease, StoredEntry, Waiter
from asynckv.buffers.entries.ledger import Ledger
from asynckv.buffers.local.consumer import LocalConsumer, PendingSelect
from asynckv.buffers.local.select import (
    LocalSelect,
    build_entry,
    hand_over,
    lend,
    tensors_of,
)
from asynckv.devices.copying import CopyPool
from asynckv.tensors.arena import HeapArena, Region
from asynckv.tensors.blocks import KVMemory
from asynckv.testing import until, until_blocked
from asynckv.testing.lookup_checks.values import (
    MIB,
    borrow,
    cancelled,
    insert,
    noise,
    started,
)
from asynckv.transfers.tokens import Query, make_query
from harness.ledgers import RecordingHolder, SteppedLedger, draft_of

SPECS = {name: TensorSpec((8,), "uint8") for name in ("key", "value")}


async def test_a_taken_back_delivery_waits_for_another_before_it_is_shown() -> None:
    async with LookupBuffer(8 * MIB, max_deliver=1, drain_s=0) as buffer:
        await insert(buffer, 1, 2 * MIB, deliveries=2)
        leave = asyncio.Event()
        failing = asyncio.create_task(borrow(buffer, 1, leave, error=True))
        await until(
            lambda: any(
                x.reached
                for e in buffer.ledger.table.entries.values()
                for x in e.leases.values()
            )
        )
        leave.set()
        slow = asyncio.create_task(borrow(buffer, 1, leave))
        await asyncio.gather(failing, return_exceptions=True)
        assert buffer.statistics().undeliverable == 1
        await until(lambda: buffer.statistics().waiting_selects == 1)
        await insert(buffer, 1)
        await slow  # acknowledges what it was shown
        assert buffer.statistics().entries == 0


async def test_who_holds_too_long_cannot_acknowledge() -> None:
    async with LookupBuffer(1000, max_hold_s=0.001, drain_s=0) as buffer:
        await insert(buffer, 1)
        with pytest.raises(LeaseLost):
            async with buffer.drop_select([1]):
                await until(lambda: buffer.statistics().lapsed == 1)
        assert (await buffer.drop_select([1])).attempt == 2


async def test_a_stream_that_waits_learns_that_its_lease_has_lapsed() -> None:
    async with LookupBuffer(1000, max_hold_s=0.001, drain_s=0) as buffer:
        async with buffer.open_insert([1], None, SPECS) as writer:
            with pytest.raises(LeaseLost):
                async with buffer.open_drop_select([1]) as stream:
                    await stream.wait_for("key")
            await writer.put("key", noise(8))
            await writer.put("value", noise(8))
        await buffer.drop_select([1])


async def test_a_bad_into_does_not_count_as_a_failure() -> None:
    async with LookupBuffer(1000, max_deliver=1, drain_s=0) as buffer:
        await insert(buffer, 1)
        bad = {"key": noise(1)}
        for kind in (buffer.open_drop_select, buffer.drop_select):
            with pytest.raises(ValueError, match="key"):
                async with kind([1], into=bad):
                    pass
        assert (await buffer.drop_select([1])).attempt == 3


class Voiding(CopyPool):
    """Voids the entry the first time that something is copied."""

    def __init__(self, bench: SteppedLedger | Ledger) -> None:
        super().__init__()
        self.bench: SteppedLedger | Ledger | None = bench

    async def copy(self, *args: Any, **options: Any) -> list[bytes]:
        bench, self.bench = self.bench, None
        if bench is not None:
            bench.leases.void(bench.table.entries["first"], "max_deliver")
        return await super().copy(*args, **options)


@pytest.mark.parametrize("way", ["take", "borrow"])
async def test_an_entry_taken_back_while_it_is_copied_is_not_handed_out(
    way: str,
) -> None:
    bench = SteppedLedger(1000)
    for name in ("first", "second"):
        bench.insert(name, nbytes=64)
    consumer = LocalConsumer(bench.leases, Voiding(bench), None, lambda: None)
    targets = {"key": torch.zeros(64, dtype=torch.uint8)}
    if way == "take":
        entry = await consumer.take(Query(None), targets)
    else:
        async with consumer.borrow(Query(None), targets) as entry:
            pass
    assert entry.entry_id == "second"
    assert not bench.table.entries


async def test_an_entry_taken_back_pins_nothing_while_another_is_waited_for() -> None:
    tensors = {"0": noise(MIB), "1": noise(MIB)}
    targets = {"0.key": torch.zeros(MIB, dtype=torch.uint8)}
    async with LookupBuffer(8 * MIB, drain_s=0) as buffer:
        await buffer.insert([1], None, tensors, None, None, entry_id="first")
        pool = Voiding(buffer.ledger)
        consumer = LocalConsumer(buffer.ledger.leases, pool, None, lambda: None)
        taking = asyncio.create_task(consumer.take(Query(None), targets))
        await until(lambda: not buffer.statistics().entries)
        await until(lambda: buffer.statistics().pinned_bytes == 0)
        await insert(buffer, 2)
        with pytest.raises(ValueError, match=r"0\.key"):
            await taking


QUERY = Query(b"12345678")

ENTRY = KVEntry(None, None, None, None, None, entry_id="it")


class Uses:
    """What a pending select did."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.pending = PendingSelect(self.take, self.borrow, QUERY, {})

    async def take(self, query: Query, into: Mapping[str, KVMemory]) -> KVEntry:
        assert query is QUERY and into == {}
        self.seen.append("taken")
        await asyncio.sleep(0)
        return ENTRY

    @asynccontextmanager
    async def borrow(
        self, query: Query, into: Mapping[str, KVMemory]
    ) -> AsyncIterator[KVEntry]:
        assert query is QUERY and into == {}
        self.seen.append("borrowed")
        try:
            yield ENTRY
        except LookupError:
            self.seen.append("failed")
            raise


async def test_entering_borrows_and_hands_an_error_on(uses: Uses) -> None:
    with pytest.raises(LookupError):
        async with uses.pending as entry:
            assert entry is ENTRY
            raise LookupError
    assert uses.seen == ["borrowed", "failed"]


async def test_one_that_is_forgotten_warns_as_a_coroutine_does(
    local: LookupBuffer,
) -> None:
    with pytest.warns(RuntimeWarning, match=r"drop_select\(...\) was never awaited"):
        local.drop_select([1])


async def test_one_that_was_used_in_any_way_does_not_warn(
    recwarn: pytest.WarningsRecorder,
) -> None:
    await Uses().pending
    Uses().pending.close()
    async with Uses().pending:
        pass
    task = asyncio.create_task(Uses().pending)
    await cancelled(task)
    del task
    assert not recwarn.list


def test_entered_by_a_plain_with_it_says_what_to_write() -> None:
    pending = Uses().pending
    with pytest.raises(TypeError, match=r"write: async with drop_select\(...\) as"):
        with pending:  # type: ignore[attr-defined]
            pass
    assert repr(pending) == "<drop_select, not used yet>"
    pending.close()
    assert repr(pending) == "<drop_select, used>"


async def test_every_runner_of_coroutines_takes_it() -> None:
    assert issubclass(PendingSelect, Coroutine)
    assert await asyncio.create_task(Uses().pending) is ENTRY
    assert await asyncio.wait_for(Uses().pending, 10) is ENTRY
    assert list(await asyncio.gather(Uses().pending, Uses().pending)) == [ENTRY] * 2
    async with asyncio.TaskGroup() as group:
        task = group.create_task(Uses().pending)
    assert task.result() is ENTRY


async def test_a_task_cancelled_before_it_starts_takes_nothing(uses: Uses) -> None:
    task = asyncio.create_task(uses.pending)
    await cancelled(task)
    assert uses.seen == []


async def test_closed_unused_it_stays_unused(uses: Uses) -> None:
    uses.pending.close()
    with pytest.raises(RuntimeError, match="used before"):
        await uses.pending
    assert uses.seen == []


async def test_closed_while_it_runs_it_ends(uses: Uses) -> None:
    uses.pending.send(None)
    uses.pending.close()
    with pytest.raises(RuntimeError, match="cannot reuse"):
        uses.pending.send(None)


async def test_leaving_what_was_never_entered_is_refused() -> None:
    pending = Uses().pending
    with pytest.raises(RuntimeError, match="never entered"):
        await pending.__aexit__(None, None, None)
    pending.close()


POOL = CopyPool()

Hand = Callable[
    [Lease, CopyPool, dict[str, torch.Tensor]], Coroutine[None, None, KVEntry]
]


def lease_of(deliveries: int = 1) -> Lease:
    entry = StoredEntry(draft_of("it", (1, 2), deliveries=deliveries), 1)
    entry.place_regions(HeapArena(100).allocate(entry.draft.layout.sizes) or [])
    stored(entry).fill_(7)
    return Lease(entry, Waiter(Query(None), RecordingHolder(), 1, None), 2, 3, b"token")


def stored(entry: StoredEntry) -> torch.Tensor:
    part = entry.parts[0]
    assert part.region is not None
    return part.region.tensor(part.spec)


@pytest.fixture
def lease() -> Lease:
    return lease_of()


async def test_the_last_delivery_gets_the_memory_itself(lease: Lease) -> None:
    entry = await hand_over(lease, POOL, {})
    assert entry.key_tensor.data_ptr() == stored(lease.entry).data_ptr()


async def test_memory_that_cannot_be_shown_is_copied(
    lease: Lease,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    region = lease.entry.parts[0].region
    tensor = stored(lease.entry)

    def refuse(region: Region, spec: TensorSpec) -> torch.Tensor:
        raise OSError("too many mappings")

    monkeypatch.setattr(Region, "tensor", refuse)
    entry = await hand_over(lease, POOL, {})
    assert entry.key_tensor.tolist() == [7] * 8
    assert entry.key_tensor.data_ptr() != tensor.data_ptr()
    assert region is lease.entry.parts[0].region


async def test_the_loop_goes_on_while_many_tensors_are_handed_over() -> None:
    layers = {str(layer): torch.zeros(1) for layer in range(320)}
    async with LookupBuffer("8MiB", drain_s=0) as buffer:
        await buffer.insert([1], None, layers, None, None)
        taking, ticks = asyncio.create_task(buffer.drop_select([1])), 0
        while not taking.done():
            await asyncio.sleep(0)
            ticks += 1
        assert ticks > 320 // 16


@pytest.mark.parametrize(("deliveries", "hand"), [(2, hand_over), (1, lend)])
async def test_any_other_delivery_gets_a_copy(deliveries: int, hand: Hand) -> None:
    lease = lease_of(deliveries)
    (await hand(lease, POOL, {})).key_tensor.fill_(9)
    assert stored(lease.entry).tolist() == [7] * 8


async def test_an_entry_says_how_it_was_delivered() -> None:
    entry = await lend(lease_of(), POOL, {})
    assert (entry.entry_id, entry.matched_tokens, entry.attempt) == ("it", 2, 3)
    assert entry.input_tokens is not None
    assert entry.input_tokens.tolist() == [1, 2]


async def test_its_tokens_are_a_copy_too(lease: Lease) -> None:
    entry = build_entry(lease, {"key": torch.zeros(8)})
    assert entry.input_tokens is not None
    entry.input_tokens.fill_(9)
    assert lease.entry.input_tokens is not None
    assert lease.entry.input_tokens.tensor().tolist() == [1, 2]


async def test_what_has_left_cannot_be_read(lease: Lease) -> None:
    lease.entry.drop_regions()
    with pytest.raises(LeaseLost):
        await tensors_of(lease.entry.parts, POOL, {})


class Bench:
    """A ledger and one local query of it."""

    def __init__(self, *, streams: bool = False) -> None:
        self.ledger = Ledger(HeapArena(1000), max_deliver=5, max_hold_s=None)
        query = make_query([1], None)
        self.holder = LocalSelect(self.ledger.leases, query, None, streams=streams)

    def begin(self, name: str, *, streaming: bool = False) -> StoredEntry:
        entry = self.ledger.table.admit(draft_of(name, streaming=streaming))
        self.ledger.ask_for_room(entry)
        return entry

    def finish(self, entry: StoredEntry) -> None:
        self.ledger.landed(entry, 0, b"d")
        self.ledger.commit(entry)


@pytest.fixture
async def bench() -> Bench:
    return Bench()


@pytest.fixture
async def streaming() -> Bench:
    return Bench(streams=True)


@pytest.fixture
def uses() -> Uses:
    return Uses()


def test_each_call_is_a_consumer_of_its_own() -> None:
    async def consumers() -> set[str]:
        return {Bench().holder.consumer for _ in range(3)}

    assert len(asyncio.run(consumers())) == 3


async def test_waits_on_if_the_producer_fails(bench: Bench) -> None:
    whole = asyncio.create_task(bench.holder.lease())
    for name in ("a", "b"):
        entry = bench.begin(name)
        await until_blocked(whole)
        bench.ledger.forsake(entry)
    bench.finish(bench.begin("c"))
    assert (await whole).entry.entry_id == "c"


async def test_woken_cancelled_with_an_entry_in_hand_it_gives_it_back(
    bench: Bench,
) -> None:
    whole = await started(bench.holder.lease())
    bench.finish(bench.begin("a"))
    await cancelled(whole)
    bench.holder.give_back(failed=False)
    assert not bench.ledger.table.entries["a"].leases
    assert bench.ledger.leases.waiting_count == 0


async def test_a_stream_is_shown_what_has_a_writer_or_is_whole(
    streaming: Bench,
) -> None:
    shown = asyncio.create_task(streaming.holder.lease())
    whole = streaming.begin("whole")
    await until_blocked(shown)
    assert not shown.done()
    streaming.finish(whole)
    assert (await shown).entry is whole


async def test_a_stream_that_began_learns_that_its_producer_failed(
    streaming: Bench,
) -> None:
    entry = streaming.begin("a", streaming=True)
    lease = await streaming.holder.lease()
    streaming.ledger.leases.reach(lease)
    landed = await started(streaming.holder.landed(lease, 0))
    streaming.ledger.abort_streaming(entry)
    with pytest.raises(EntryAborted, match="producer"):
        await landed


async def test_a_stream_that_did_not_begin_goes_back_to_waiting(
    streaming: Bench,
) -> None:
    shown = await started(streaming.holder.lease())
    streaming.ledger.abort_streaming(streaming.begin("a", streaming=True))
    streaming.begin("b", streaming=True)
    assert (await shown).entry.entry_id == "b"


async def test_a_delivery_that_was_taken_back_is_not_read_on(streaming: Bench) -> None:
    streaming.begin("a", streaming=True)
    lease = await streaming.holder.lease()
    streaming.ledger.leases.give_back(lease, reached=False)
    with pytest.raises(LeaseLost):
        await streaming.holder.landed(lease, 0)


async def test_a_cancelled_wait_is_not_remembered(bench: Bench) -> None:
    for _ in range(3):
        waiting = await started(bench.holder.lease())
        await cancelled(waiting)
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
    waiting = await started(holder.lease())
    assert "any tokens) waits for a match" in caplog.text
    waiting.cancel()
