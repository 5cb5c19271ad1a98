"""Entries that are written and read layer by layer in this process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import torch

from asynckv import (
    BufferClosed,
    EntryAborted,
    EntryTooLarge,
    LeaseLost,
    LookupBuffer,
    TensorSpec,
)
from asynckv.buffers.entries.entries import StoredEntry
from asynckv.buffers.local.writer import (
    Declared,
    LocalSource,
    LocalViews,
)
from asynckv.devices.copying import CopyPool
from asynckv.testing import until
from asynckv.testing.lookup_checks.values import MIB, cancelled, noise, same, started
from asynckv.transfers.tokens import Query
from harness.fake_devices import FakeDevice
from harness.ledgers import RecordingHolder, SteppedLedger, draft_of

SPECS = {name: TensorSpec((8,), "uint8") for name in ("key", "value")}

LARGE_SPECS = {name: TensorSpec((MIB,), "uint8") for name in ("key", "value")}


@pytest.fixture
async def buffer() -> AsyncIterator[LookupBuffer]:
    async with LookupBuffer(1000, drain_s=0) as buffer:
        yield buffer


@pytest.fixture
async def on_gpu(gpu: FakeDevice) -> AsyncIterator[LookupBuffer]:
    """A buffer on a GPU."""
    async with LookupBuffer("4MiB", device=gpu.device, drain_s=0) as buffer:
        yield buffer


async def test_a_cancelled_put_may_be_made_again() -> None:
    nbytes = 8 * 2**20
    async with LookupBuffer(2 * nbytes, drain_s=0) as buffer:
        specs = {"key": TensorSpec((nbytes,), "uint8")}
        async with buffer.open_insert([1], None, specs) as writer:
            overwritten = noise(nbytes)
            putting = asyncio.create_task(writer.put("key", overwritten))
            await asyncio.sleep(0)
            await cancelled(putting)
            overwritten.fill_(9)
            await writer.put("key", noise(nbytes))
        assert same((await buffer.drop_select([1])).key, noise(nbytes))


@pytest.mark.usefixtures("no_slabs")
async def test_a_put_for_which_there_is_no_memory_aborts_its_entry_alone() -> None:
    specs = {"key": TensorSpec((2**48,), "uint8")}
    async with LookupBuffer(2**49, drain_s=0) as buffer:
        with pytest.raises(EntryTooLarge, match="no memory for"):
            async with buffer.open_insert([1], None, specs) as writer:
                await writer.put("key", noise(1).expand(2**48))
        assert buffer.statistics().used_bytes == 0


async def test_a_writer_of_an_entry_that_is_gone_learns_it() -> None:
    buffer = LookupBuffer(1000)
    with pytest.raises(EntryAborted):
        async with buffer.open_insert([1], None, SPECS) as writer:
            buffer.abort()
            await writer.put("key", noise(8))


async def test_leaving_wakes_who_still_waits_for_a_tensor(buffer: LookupBuffer) -> None:
    async with buffer.open_insert([1], None, SPECS) as writer:
        async with buffer.open_drop_select([1]) as stream:
            waiting = await started(stream.wait_for("key"))
        with pytest.raises(LeaseLost):
            await waiting
        for name in SPECS:
            await writer.put(name, noise(8))


async def test_leaving_by_an_error_wakes_who_still_waits_for_a_tensor(
    buffer: LookupBuffer,
) -> None:
    async with buffer.open_insert([1], None, SPECS) as writer:
        with pytest.raises(LookupError):
            async with buffer.open_drop_select([1]) as stream:
                waiting = await started(stream.wait_for("key"))
                raise LookupError
        with pytest.raises(LeaseLost):
            await asyncio.wait_for(waiting, 10)
        for name in SPECS:
            await writer.put(name, noise(8))


async def test_a_cancelled_read_reads_the_same_tensor_again(
    buffer: LookupBuffer,
) -> None:
    async with buffer.open_insert([1], None, SPECS) as writer:
        async with buffer.open_drop_select([1]) as stream:
            reading = await started(stream.wait_for("key"))
            await cancelled(reading)
            await writer.put("key", noise(8))
            assert (await anext(stream))[0] == "key"
            assert await stream.wait_for("key") is await stream.wait_for("key")
        await writer.put("value", noise(8))


async def test_views_are_shown_as_they_land_and_copied_nowhere(
    on_gpu: LookupBuffer, gpu: FakeDevice
) -> None:
    has = len(gpu.process.owned)
    async with on_gpu.open_insert([1], None, LARGE_SPECS, entry_id="e") as writer:
        await writer.put("value", noise(MIB, 2))
        async with on_gpu.open_views("e") as views:
            assert isinstance(views, LocalViews)
            name, tensor = await anext(views)
            assert (name, tensor.is_cuda) == ("value", True)
            assert same(tensor.cpu(), noise(MIB, 2))
            del tensor
            await writer.put("key", noise(MIB))
            assert same((await views.wait_for("key")).cpu(), noise(MIB))
            assert len(gpu.process.owned) == has
    assert not on_gpu.statistics().used_bytes


async def test_memory_that_somebody_has_a_view_of_is_nobody_elses(
    on_gpu: LookupBuffer,
) -> None:
    await on_gpu.insert([1], None, noise(MIB), None, None, entry_id="e")
    async with on_gpu.open_views("e") as views:
        kept = await views.wait_for("key")
    await on_gpu.insert([2], None, noise(2 * MIB, 2), None, None)
    assert same(kept.cpu(), noise(MIB))
    assert on_gpu.statistics().pinned_bytes == MIB
    del kept


@pytest.mark.parametrize("nbytes", [8, MIB])
async def test_who_takes_an_entry_writes_to_no_view_of_it(
    on_gpu: LookupBuffer, nbytes: int
) -> None:
    await on_gpu.insert(
        *([1], None, noise(nbytes), None, None), entry_id="e", deliveries=2
    )
    async with on_gpu.open_views("e") as views:
        kept = await views.wait_for("key")
    key = (await on_gpu.drop_select([1])).key_tensor
    key.fill_(7)
    assert same(kept.cpu(), noise(nbytes))
    del kept, key


async def test_memory_of_the_host_is_shown_to_nobody() -> None:
    async with LookupBuffer("4MiB", drain_s=0) as buffer:
        await buffer.insert([1], None, noise(8), None, None, entry_id="e")
        with pytest.raises(RuntimeError, match="is for a buffer on a GPU"):
            async with buffer.open_views("e"):
                pass
        await buffer.drop_select([1])


async def test_what_is_gone_is_shown_no_more(on_gpu: LookupBuffer) -> None:
    await on_gpu.insert([1], None, noise(8), None, None, entry_id="e")
    with pytest.raises(EntryAborted):
        async with on_gpu.open_views("e") as views:
            on_gpu.abort()
            await views.wait_for("key")


SPEC = SPECS["key"]


def test_a_tensor_is_put_once() -> None:
    declared = Declared(SPECS)
    with declared.putting("key", SPEC), pytest.raises(ValueError, match="before"):
        with declared.putting("key", SPEC):
            raise LookupError
    with pytest.raises(ValueError, match="before"), declared.putting("key", SPEC):
        raise LookupError


def test_a_put_that_failed_may_be_made_again() -> None:
    declared = Declared(SPECS)
    with pytest.raises(LookupError), declared.putting("key", SPEC):
        raise LookupError
    with declared.putting("key", SPEC):
        pass
    with pytest.raises(ValueError, match="not put: value"):
        declared.check_whole()


def test_what_is_still_being_put_is_missing() -> None:
    declared = Declared(SPECS)
    with declared.putting("value", SPEC):
        with declared.putting("key", SPEC):
            pass
        with pytest.raises(ValueError, match=r"1 declared .* not put: value;.*await"):
            declared.check_whole()
    declared.check_whole()


async def test_first_tensors_are_passed_on_while_the_last_are_copied() -> None:
    async with LookupBuffer("64MiB", drain_s=0) as buffer:
        holder = RecordingHolder()
        buffer.ledger.leases.select(Query(None), holder, None)
        layers = {name: noise(5 * MIB) for name in "abcd"}
        inserting = asyncio.create_task(buffer.insert(None, None, layers, None, None))
        await until(lambda: "landed 0" in holder.heard)
        assert "landed 3" not in holder.heard
        await cancelled(inserting)
        assert holder.heard[-1] == "retracted"


async def test_the_digest_is_that_of_the_entry_once_it_is_in() -> None:
    tensor, bench = noise(8), SteppedLedger()
    entry = bench.begin("a")
    source = LocalSource({"key": tensor}, CopyPool())
    await source.fill(
        entry, lambda index, digest: bench.ledger.landed(entry, index, digest)
    )
    bench.ledger.commit(entry)
    assert await source.digest(entry.draft) == entry.digest()


async def test_the_loop_goes_on_between_many_small_tensors() -> None:
    async with LookupBuffer("64MiB", drain_s=0) as buffer:
        holder = RecordingHolder()
        buffer.ledger.leases.select(Query(None), holder, None)
        layers = {str(layer): noise(8) for layer in range(40)}
        inserting = asyncio.create_task(buffer.insert(None, None, layers, None, None))
        await until(lambda: "landed 0" in holder.heard)
        assert "landed 15" in holder.heard
        assert "landed 16" not in holder.heard
        await inserting
        assert "landed 39" in holder.heard


async def test_what_has_left_already_is_not_filled() -> None:
    source = LocalSource({"key": noise(8)}, CopyPool())
    with pytest.raises(LeaseLost):
        await source.fill(StoredEntry(draft_of("a"), 1), lambda index, digest: None)


async def test_an_insert_whose_buffer_is_closed_midway_is_told_so() -> None:
    layers = {f"{number}": torch.ones(8) for number in range(40)}  # several batches
    async with LookupBuffer("16MiB", drain_s=0) as buffer:
        inserting = asyncio.create_task(
            buffer.insert([1], None, layers, None, None, entry_id="x")
        )
        entries = buffer.ledger.table.entries
        await until(lambda: "x" in entries and bool(entries["x"].landed))
        buffer.abort()
        with pytest.raises(BufferClosed):
            await inserting
