from __future__ import annotations

import asyncio

import pytest
import torch

from asynckv.buffers.entries.entries import Lease, StoredEntry, Waiter
from asynckv.buffers.local.handover import (
    build_entry,
    hand_over,
    lend,
    tensors_of,
)
from asynckv.buffers.lookup import LookupBuffer
from asynckv.devices.copying import CopyPool
from asynckv.errors import LeaseLost
from asynckv.tensors.arena import HeapArena, Region
from asynckv.transfers.queries import Query
from asynckv.types import TensorSpec
from harness.holders import RecordingHolder, draft_of

POOL = CopyPool()


def leased(deliveries: int = 1) -> Lease:
    entry = StoredEntry(draft_of("it", (1, 2), deliveries=deliveries), 1)
    entry.place_regions(HeapArena(100).allocate(entry.draft.layout.sizes) or [])
    stored(entry).fill_(7)
    return Lease(entry, Waiter(Query(None), RecordingHolder(), 1, None), 2, 3, b"token")


def stored(entry: StoredEntry) -> torch.Tensor:
    part = entry.parts[0]
    assert part.region is not None
    return part.region.tensor(part.spec)


def of(key: object) -> torch.Tensor:
    assert isinstance(key, torch.Tensor)
    return key


async def test_the_last_delivery_gets_the_memory_itself() -> None:
    lease = leased()
    entry = await hand_over(lease, POOL, {})
    assert of(entry.key).data_ptr() == stored(lease.entry).data_ptr()


async def test_memory_that_cannot_be_shown_is_copied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lease = leased()
    region = lease.entry.parts[0].region
    tensor = stored(lease.entry)

    def refuse(region: Region, spec: TensorSpec) -> torch.Tensor:
        raise OSError("too many mappings")

    monkeypatch.setattr(Region, "tensor", refuse)
    entry = await hand_over(lease, POOL, {})
    assert of(entry.key).tolist() == [7] * 8
    assert of(entry.key).data_ptr() != tensor.data_ptr()
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


async def test_any_other_delivery_gets_a_copy() -> None:
    for lease, hand in ((leased(2), hand_over), (leased(), lend)):
        entry = await hand(lease, POOL, {})
        of(entry.key).fill_(9)
        assert stored(lease.entry).tolist() == [7] * 8


async def test_into_is_where_it_lands() -> None:
    for hand in (hand_over, lend):
        target = torch.zeros(8, dtype=torch.uint8)
        entry = await hand(leased(), POOL, {"key": target})
        assert entry.key is target
        assert target.tolist() == [7] * 8


async def test_an_entry_says_how_it_was_delivered() -> None:
    entry = await lend(leased(), POOL, {})
    assert (entry.entry_id, entry.matched_tokens, entry.attempt) == ("it", 2, 3)
    assert entry.input_tokens is not None
    assert entry.input_tokens.tolist() == [1, 2]


async def test_its_tokens_are_a_copy_too() -> None:
    lease = leased()
    entry = build_entry(lease, {"key": torch.zeros(8)})
    assert entry.input_tokens is not None
    entry.input_tokens.fill_(9)
    assert lease.entry.input_tokens is not None
    assert lease.entry.input_tokens.tensor().tolist() == [1, 2]


async def test_what_has_left_cannot_be_read() -> None:
    lease = leased()
    lease.entry.drop_regions()
    with pytest.raises(LeaseLost):
        await tensors_of(lease.entry.parts, POOL, {})
