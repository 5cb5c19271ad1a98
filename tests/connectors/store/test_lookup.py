"""A lookup asks a store for the values of prompts, and holds what is there."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from collections.abc import AsyncIterator, Sequence

import pytest
import torch

from asynckv.buffers.serve import serve
from asynckv.buffers.store import StoreBuffer
from asynckv.config import KVTransferConfig
from asynckv.connectors.engine import (
    SHAPE_KEY,
    KVEngine,
    StoredShape,
    namespace_of,
    prefix_block_keys,
    rank_block_keys,
)
from asynckv.connectors.store.lookup import PrefixLookup, StorePins
from asynckv.errors import PeerLost
from asynckv.testing.blocked import until

ENGINE = KVEngine(engine_id="E", block_size=4, tp_size=2)


class StalledStore(StoreBuffer):
    """Answers when it is told that it may."""

    def __init__(self) -> None:
        super().__init__("1MiB")
        self.goes_on = asyncio.Event()
        self.asked = self.gets = self.pins = 0

    async def contains(self, keys: Sequence[str]) -> tuple[bool, ...]:
        self.asked += 1
        await self.goes_on.wait()
        return await super().contains(keys)

    async def get(
        self, key: str, into: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        self.gets += 1
        await self.goes_on.wait()
        return await super().get(key, into)

    @contextlib.asynccontextmanager
    async def pin(
        self,
        keys: Sequence[str],
        *,
        within_s: float | None = None,
        prefix: bool = False,
    ) -> AsyncIterator[tuple[bool, ...]]:
        self.asked += 1
        self.pins += 1
        try:
            await self.goes_on.wait()
        finally:
            self.pins -= 1
        async with super().pin(keys, within_s=within_s, prefix=prefix) as found:
            yield found


KEYS = prefix_block_keys(range(10), ENGINE.block_size)


@contextlib.asynccontextmanager
async def finding() -> AsyncIterator[tuple[PrefixLookup, StoreBuffer]]:
    async with StoreBuffer("1MiB") as store:
        extra: dict[str, object] = {"chunk_tokens": 4}
        config = KVTransferConfig(kv_connector_extra_config=extra)
        finder = PrefixLookup(config, ENGINE, store)
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


async def test_what_only_some_ranks_have_is_not_held() -> None:
    async with finding() as (finder, store):
        (key,) = keys_of(0, 1)
        await store.put(key, torch.zeros(2**16, dtype=torch.uint8))
        assert await finder.find(KEYS) == 0
        await until(lambda: not len(finder.holds))
        await fill(store)
        assert await store.contains([key]) == (False,)


async def test_blocks_of_an_engine_that_is_cut_otherwise_are_refused_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with finding() as (finder, store):
        other = KVEngine(engine_id="O", block_size=8, tp_size=2)
        await store.put(SHAPE_KEY, StoredShape.of(other, 32).tensor())
        for _ in range(2):
            assert await finder.find(KEYS) == 0
        said = "block_size=8 there and 4 here, chunk_tokens=32 there and 4 here"
        assert finder.refused == said
        assert len(caplog.messages) == 1 and said in caplog.text


async def test_what_was_found_stays_until_its_load_can_begin() -> None:
    async with finding() as (finder, store):
        for key in (*keys_of(0, 2), *keys_of(1, 2)):
            await store.put(key, torch.zeros(2**16, dtype=torch.uint8))
        assert await finder.find(KEYS) == 2
        for number in range(40):
            filler = torch.zeros(2**16, dtype=torch.uint8)
            await store.put(f"filler {number}", filler)
        assert await finder.find(KEYS) == 2


async def test_what_is_not_needed_is_let_go_although_nobody_asks_again() -> None:
    async with finding() as (finder, store):
        for key in (*keys_of(0, 1), *keys_of(1, 1)):
            await store.put(key, torch.zeros(2**16, dtype=torch.uint8))
        assert await finder.find(KEYS, 7) == 1
        finder.let_go(7)
        await until(lambda: not len(finder.holds))
        await fill(store)
        assert await finder.find(KEYS) == 0


async def test_a_lookup_that_is_cancelled_as_it_finds_something_holds_nothing() -> None:
    async with finding() as (finder, store):
        for key in (*keys_of(0, 1), *keys_of(1, 1)):
            await store.put(key, torch.ones(1))
        was_held = 0
        for turns in range(20):
            lookup = asyncio.create_task(finder.find(KEYS, turns))
            for _ in range(turns):
                await asyncio.sleep(0)
            was_held += len(finder.holds) and not lookup.done()
            if not lookup.cancel():
                assert await lookup == 1
                finder.holds.let_go(turns)
            await asyncio.wait({lookup})
            assert not len(finder.holds)
        assert was_held


async def test_all_is_asked_at_once() -> None:
    async with StalledStore() as store:
        for rank in range(2):
            for key in keys_of(rank, 1 + rank):
                await store.put(key, torch.ones(1))
        finder = PrefixLookup(
            KVTransferConfig(kv_connector_extra_config={"lookup_timeout_s": 60}),
            *(ENGINE, store),
        )
        finding = asyncio.create_task(finder.find(KEYS))
        await until(lambda: (store.asked, store.gets) == (1, 1))
        store.goes_on.set()
        assert await finding == 1
        await finder.aclose()


async def test_a_silent_store_is_waited_for_once_until_it_answers(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    async with StalledStore() as store:
        config = KVTransferConfig(kv_connector_extra_config={"lookup_timeout_s": 0.2})
        finder = PrefixLookup(config, ENGINE, store)
        with pytest.raises(TimeoutError):
            await finder.find(KEYS)
        assert not store.pins
        for _ in range(3):
            with pytest.raises(PeerLost, match="has been silent"):
                await finder.find(KEYS)
        await until(lambda: store.asked == 2)  # and once beside all lookups
        assert not finder.line.is_reachable
        store.goes_on.set()
        await until(lambda: finder.line.is_reachable)
        assert await finder.find(KEYS) == 0
        lost, back = caplog.messages
        assert "no answer within 0.2 s (lookup_timeout_s)" in lost
        assert "answers again" in back
        await finder.aclose()


async def test_of_what_is_let_go_while_a_store_is_silent_nothing_is_kept() -> None:
    async with StalledStore() as store:
        config = KVTransferConfig(kv_connector_extra_config={"lookup_timeout_s": 0.2})
        finder = PrefixLookup(config, ENGINE, store)
        with pytest.raises(TimeoutError):
            await finder.find(KEYS)
        number = int("1000000")  # an object of its own
        known = sys.getrefcount(number)
        finder.let_go(number)
        with pytest.raises(PeerLost, match="has been silent"):
            await finder.find(KEYS)
        assert sys.getrefcount(number) == known
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


async def fill(store: StoreBuffer) -> None:
    """Put so much that all that can be dropped is."""
    for number in range(40):
        await store.put(f"filler {number}", torch.zeros(2**17, dtype=torch.uint8))


async def test_what_is_held_is_not_evicted_and_what_is_let_go_is() -> None:
    holds = StorePins(3600, 8)
    async with StoreBuffer("2MiB") as store:
        await store.put("a", torch.zeros(2**17, dtype=torch.uint8))
        assert await holds.hold(store, ["a", "b"], 1.0, 0) == (True, False)
        await fill(store)
        assert await store.contains(["a"]) == (True,)
        await holds.release()
        await fill(store)
        assert await store.contains(["a"]) == (False,)
        assert await holds.hold(store, ["a"], 1.0, 1) == (False,)
        await holds.aclose()
        assert not len(holds)
        with pytest.raises(PeerLost):
            await holds.hold(store, ["a"], 1.0, 1)


async def test_of_a_burst_it_holds_the_last_and_all_of_it_is_answered() -> None:
    holds = StorePins(3600, 2)
    async with StoreBuffer("2MiB") as store:
        for key in ("a", "b", "c", "d"):
            await store.put(key, torch.zeros(2**17, dtype=torch.uint8))
        answers = await asyncio.gather(
            *(holds.hold(store, [key], 1.0, ord(key)) for key in "abcd")
        )
        assert answers == [(True,)] * 4
        await fill(store)
        assert await store.contains(["a", "b", "c", "d"]) == (False, False, True, True)
        await holds.aclose()


async def test_what_is_asked_while_it_closes_is_not_held() -> None:
    holds = StorePins(3600, 2)
    async with StoreBuffer() as store:
        await holds.hold(store, ["a"], 1.0, 1)
        holds.abort()  # what is held ends soon, and has not yet
        with pytest.raises(PeerLost):
            await holds.hold(store, ["a"], 1.0, 1)
        await holds.aclose()
        assert not len(holds)


async def test_it_holds_so_many_at_once_and_for_so_long() -> None:
    async with StoreBuffer() as store:
        holds = StorePins(3600, 2)
        for number in range(5):
            await holds.hold(store, ["a"], 1.0, number)
            await asyncio.sleep(0)
        assert len(holds) <= 2
        holds.abort()
        await holds.aclose()
        short = StorePins(0, 2)
        await short.hold(store, ["a"], 1.0, 0)
        await until(lambda: not len(short))
