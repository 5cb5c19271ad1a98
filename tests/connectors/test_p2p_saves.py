from __future__ import annotations

import asyncio

import torch

from asynckv.buffers.lookup import LookupBuffer
from asynckv.connectors.caches import PagedCaches
from asynckv.connectors.headers import EntryHeader
from asynckv.connectors.p2p_orders import SaveOrder
from asynckv.connectors.p2p_saves import P2PSave

ORDER = SaveOrder("r", "t", "", (1, 2, 3), ((2, 0),))
HEADER = EntryHeader(engine_id="P", rank=0, block_size=2, layers=("a", "b"))


def save_of() -> tuple[P2PSave, PagedCaches]:
    caches = PagedCaches({layer: torch.arange(8.0).view(4, 2) for layer in "ab"}, None)
    return P2PSave(caches, ORDER, HEADER, 60), caches


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
