from __future__ import annotations

import asyncio

import pytest
import torch

from asynckv.buffers.lookup import LookupBuffer
from asynckv.connectors.block_moves import BlockMoves
from asynckv.connectors.caches import PagedCaches
from asynckv.connectors.headers import EntryHeader, NotSaved
from asynckv.connectors.p2p_orders import SaveOrder
from asynckv.connectors.p2p_saves import P2PSave, tell_failure
from asynckv.errors import EntryConflict
from asynckv.tensors.copying import CopyPool

ORDER = SaveOrder("r", "t", "", (1, 2, 3), ((2, 0),))
HEADER = EntryHeader(engine_id="P", rank=0, block_size=2, layers=("a", "b"))


def save_of() -> tuple[P2PSave, PagedCaches]:
    caches = PagedCaches({layer: torch.arange(8.0).view(4, 2) for layer in "ab"}, None)
    return P2PSave(BlockMoves(caches, CopyPool()), ORDER, HEADER, 60), caches


async def test_each_layer_leaves_as_soon_as_it_is_offered() -> None:
    save, _ = save_of()
    async with LookupBuffer("16MiB") as buffer:

        async def find() -> LookupBuffer:
            return buffer

        save.offer("b")
        saving = asyncio.create_task(save.run([(find, "t", 1)]))
        async with buffer.open_drop_select(entry_id="t") as stream:
            b = await stream.wait_for("b.key")
            assert b.tolist() == [[4, 5], [0, 1]]
            assert EntryHeader.of(await stream.wait_for("extras.asynckv")) == HEADER
            save.offer("b")
            save.offer_rest()
            await saving
            await stream.wait_for("a.key")
        assert save.nbytes == 2 * 16


async def test_a_cancelled_save_is_no_entry() -> None:
    save, _ = save_of()
    async with LookupBuffer("16MiB") as buffer:

        async def find() -> LookupBuffer:
            return buffer

        saving = asyncio.create_task(save.run([(find, "t", 1)]))
        save.offer("a")
        await asyncio.sleep(0)
        saving.cancel()
        await asyncio.wait([saving])
        assert await buffer.peek([1, 2, 3]) == 0


async def test_nobody_to_save_for_is_no_work() -> None:
    save, _ = save_of()
    await save.run([])


@pytest.mark.parametrize("is_early", [False, True])
async def test_who_waits_for_what_was_not_saved_learns_why(is_early: bool) -> None:
    async with LookupBuffer("16MiB", drain_s=0) as buffer:

        async def find() -> LookupBuffer:
            return buffer

        async def ask() -> None:
            async with buffer.drop_select(entry_id="t") as entry:
                EntryHeader.of(entry.extras["asynckv"]).check_saved()

        asking = asyncio.create_task(ask()) if is_early else None
        await asyncio.sleep(0)
        await tell_failure((find, "t", 1), (1, 2, 3), HEADER, "too\nlarge", 60)
        with pytest.raises(NotSaved, match="P/0 has not saved it: too.*large"):
            await (asking or ask())


async def test_what_was_saved_whole_stays_whole() -> None:
    async with LookupBuffer("16MiB", drain_s=0) as buffer:

        async def find() -> LookupBuffer:
            return buffer

        await buffer.insert([1, 2, 3], None, torch.ones(3), None, None, entry_id="t")
        with pytest.raises(EntryConflict):
            await tell_failure(
                (find, "t", 1), (1, 2, 3), HEADER, "another rank failed", 60
            )
        assert await buffer.peek([1, 2, 3]) == 3
