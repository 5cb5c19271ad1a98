from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import pytest
import torch

from asynckv.buffers.store import StoreBuffer
from asynckv.config import KVTransferConfig
from asynckv.connectors.engine import KVEngine
from asynckv.connectors.keys import prefix_block_keys, rank_block_keys
from asynckv.connectors.store_finder import StoreFinder
from asynckv.connectors.store_shapes import SHAPE_KEY, StoredShape, namespace_of

ENGINE = KVEngine(engine_id="E", block_size=4, tp_size=2)
KEYS = prefix_block_keys(range(10), ENGINE.block_size)


@contextlib.asynccontextmanager
async def finding() -> AsyncIterator[tuple[StoreFinder, StoreBuffer]]:
    async with StoreBuffer("1MiB") as store:
        finder = StoreFinder(KVTransferConfig(kv_role="kv_both"), ENGINE, store)
        try:
            yield finder, store
        finally:
            await finder.aclose()


def keys_of(rank: int, count: int) -> list[str]:
    return rank_block_keys(KEYS[:count], namespace_of(ENGINE), rank)


async def test_a_block_is_there_when_every_rank_s_part_is() -> None:
    async with finding() as (finder, store):
        assert await finder.find(KEYS) == 0
        for key in (*keys_of(0, 2), *keys_of(1, 1)):
            await store.put(key, torch.ones(1))
        assert await finder.find(KEYS) == 1


async def test_blocks_of_an_engine_that_is_cut_otherwise_are_refused_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with finding() as (finder, store):
        other = KVEngine(engine_id="O", block_size=8, tp_size=2)
        await store.put(SHAPE_KEY, StoredShape.of(other).tensor())
        for _ in range(2):
            assert await finder.find(KEYS) == 0
        assert finder.refused == "block_size=8 there and 4 here"
        assert len(caplog.messages) == 1 and "8 there and 4 here" in caplog.text


async def test_what_was_found_stays_until_its_load_can_begin() -> None:
    async with finding() as (finder, store):
        for key in (*keys_of(0, 2), *keys_of(1, 2)):
            await store.put(key, torch.zeros(2**16, dtype=torch.uint8))
        assert await finder.find(KEYS) == 2
        for number in range(40):
            filler = torch.zeros(2**16, dtype=torch.uint8)
            await store.put(f"filler {number}", filler)
        assert await finder.find(KEYS) == 2
