from __future__ import annotations

import asyncio

import pytest

from asynckv.buffers.entries.entries import StoredEntry
from asynckv.buffers.local.writer import LocalSource
from asynckv.buffers.lookup import LookupBuffer
from asynckv.devices.copying import CopyPool
from asynckv.errors import LeaseLost
from asynckv.testing.blocked import until
from asynckv.testing.lookup_checks.values import MIB, cancelled, noise
from asynckv.transfers.queries import Query
from harness.holders import RecordingHolder, draft_of
from harness.ledgers import SteppedLedger


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
