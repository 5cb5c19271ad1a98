from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Sequence

import pytest
import torch

from asynckv.buffers.serve import serve
from asynckv.buffers.store import StoreBuffer
from asynckv.config import KVTransferConfig
from asynckv.connectors.engine import KVEngine
from asynckv.connectors.keys import prefix_block_keys, rank_block_keys
from asynckv.connectors.store.lookup import (
    SHAPE_KEY,
    PrefixLookup,
    StoredShape,
    namespace_of,
)
from asynckv.errors import PeerLost
from asynckv.testing.blocked import until


class StalledStore(StoreBuffer):
    """Answers when it is told that it may."""

    def __init__(self) -> None:
        super().__init__("1MiB")
        self.goes_on = asyncio.Event()
        self.asked = 0

    async def contains(self, keys: Sequence[str]) -> tuple[bool, ...]:
        self.asked += 1
        await self.goes_on.wait()
        return await super().contains(keys)

    async def match_prefix(self, block_keys: Sequence[str]) -> int:
        return sum(await self.contains(block_keys))


ENGINE = KVEngine(engine_id="E", block_size=4, tp_size=2)
KEYS = prefix_block_keys(range(10), ENGINE.block_size)


@contextlib.asynccontextmanager
async def finding() -> AsyncIterator[tuple[PrefixLookup, StoreBuffer]]:
    async with StoreBuffer("1MiB") as store:
        finder = PrefixLookup(KVTransferConfig(kv_role="kv_both"), ENGINE, store)
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


async def test_a_silent_store_is_waited_for_once_until_it_answers(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    async with StalledStore() as store:
        config = KVTransferConfig(kv_connector_extra_config={"lookup_timeout_s": 0.01})
        finder = PrefixLookup(config, ENGINE, store)
        with pytest.raises(TimeoutError):
            await finder.find(KEYS)
        for _ in range(3):
            with pytest.raises(PeerLost, match="has been silent"):
                await finder.find(KEYS)
        await until(lambda: store.asked == 2)  # and once beside all lookups
        assert not finder.line.is_reachable
        store.goes_on.set()
        await until(lambda: finder.line.is_reachable)
        assert await finder.find(KEYS) == 0
        lost, back = caplog.messages
        assert "no answer within 0.01 s (lookup_timeout_s)" in lost
        assert "answers again" in back
        await finder.aclose()


async def test_a_store_that_dies_and_comes_back_is_logged_once_each(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "asynckv.connectors")
    extra: dict[str, object] = {"store": "mem://mortal", "fingerprint": "toy"}
    finder = PrefixLookup(
        KVTransferConfig(kv_connector_extra_config=extra), ENGINE, None
    )
    for _ in range(2):
        with pytest.raises(PeerLost):
            await finder.find(KEYS)
    async with StoreBuffer() as store, serve("mem://mortal", store=store):
        assert await finder.find(KEYS) == 0  # at once: it was not silent
    with pytest.raises(PeerLost):
        await finder.find(KEYS)
    await finder.aclose()
    assert [" lost " in f" {line}" for line in caplog.messages] == [True, False, True]
    assert "mem://mortal: nobody serves" in caplog.messages[0]


async def test_the_store_is_dialled_before_the_first_prompt() -> None:
    extra: dict[str, object] = {"store": "mem://early", "fingerprint": "toy"}
    finder = PrefixLookup(
        KVTransferConfig(kv_connector_extra_config=extra), ENGINE, None
    )
    async with StoreBuffer() as store, serve("mem://early", store=store):
        finder.start()
        await until(lambda: finder.line.is_reachable)
        await finder.aclose()
