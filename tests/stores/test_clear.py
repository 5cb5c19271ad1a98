"""What was cleared is found no more, however late it comes, and whatever tiers do."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
import torch

from asynckv.buffers.remote.peer import connect
from asynckv.buffers.serve import serve
from asynckv.stores.tier_stack import FlushResult
from asynckv.stores.tiered import TieredStore
from asynckv.testing.blocked import until, until_blocked
from asynckv.testing.expectations import noise
from harness.tiers import DictTier

MIB = 2**20


@pytest.fixture
def tier() -> DictTier:
    return DictTier()


@contextlib.asynccontextmanager
async def opened(*tiers: DictTier) -> AsyncIterator[TieredStore]:
    async with TieredStore(MIB, tiers, drain_s=0.2) as store:
        yield store


async def evict(store: TieredStore) -> None:
    """Let memory have nothing of what was put before."""
    await store.flush()
    await store.put("filler", noise(MIB, 99))
    await store.delete("filler")
    await store.flush()


async def test_nothing_is_left_in_memory_or_in_any_tier(tier: DictTier) -> None:
    other = DictTier()
    async with opened(tier, other) as store:
        await store.put_many([(f"far {n}", noise(64, n)) for n in range(300)])
        await evict(store)
        await store.put("near", noise(64, 1))
        assert await store.clear() == 1
        assert not any(await store.contains(["near", "far 0"]))
        assert await store.get("far 0") is None
        await store.flush()
        assert tier.values == other.values == {}
        assert store.statistics().deletes >= 1


async def test_other_models_and_namespaces_keep_what_they_have(tier: DictTier) -> None:
    async with (
        TieredStore(MIB, [tier]) as store,
        serve("mem://models", store=store),
        connect("mem://models", fingerprint="a") as first,
        connect("mem://models", fingerprint="b") as second,
        TieredStore(MIB, [tier], namespace="b", fingerprint="a") as elsewhere,
    ):
        for one in (first.store, second.store, elsewhere):
            await one.put("key", noise(64, 1))
        await store.flush()
        await elsewhere.flush()
        assert await first.store.clear() == 1
        await store.flush()
        assert len(tier.values) == 2
        assert await first.store.stat("key") is None
        for one in (second.store, elsewhere):
            told = await one.stat("key")
            assert told is not None and len(told.tiers) == 2


async def test_what_is_on_its_way_from_a_tier_is_void(tier: DictTier) -> None:
    async with opened(tier) as store:
        await store.put("a", noise(64, 1))
        await evict(store)
        tier.hold("fetch")
        getting = asyncio.create_task(store.get("a"))
        await until(lambda: tier.calls["fetch"] == 1)
        await store.clear()
        tier.let_go("fetch")
        assert await getting is None
        assert await store.get("a") is None


async def test_a_write_that_lands_after_it_is_cleared_too(tier: DictTier) -> None:
    async with opened(tier) as store:
        tier.hold("store")
        await store.put_many([(str(n), noise(64, n)) for n in range(40)])
        await until(lambda: tier.calls["store"] == 1)
        await store.clear()
        flushing = asyncio.create_task(store.flush())
        await until_blocked(flushing)
        assert not tier.calls["clear"]
        tier.let_go("store")
        await flushing
        assert tier.values == {}
        assert store.statistics().tiers["DictTier"].waiting_bytes == 0


async def test_what_is_put_meanwhile_is_written_after_it(tier: DictTier) -> None:
    async with opened(tier) as store:
        await store.put("a", noise(64, 1))
        await store.flush()
        tier.hold("clear")
        await store.clear()
        await store.put("a", noise(64, 1))
        flushing = asyncio.create_task(store.flush())
        await until_blocked(flushing)
        assert tier.calls["clear"] == 1
        tier.let_go("clear")
        assert await flushing == {"DictTier": FlushResult(2, 0, 0)}
        assert len(tier.values) == 1
        assert await store.contains(["a"]) == (True,)


async def test_a_second_one_while_the_first_is_under_way_is_made_too(
    tier: DictTier,
) -> None:
    async with opened(tier) as store:
        tier.hold("clear")
        await store.clear()
        await until(lambda: tier.calls["clear"] == 1)
        await store.put("a", noise(64, 1))
        await store.clear()
        tier.let_go("clear")
        await store.flush()
        assert tier.calls["clear"] == 2
        assert tier.values == {}


async def test_what_a_tier_did_not_clear_is_void_until_it_does(tier: DictTier) -> None:
    async with opened(tier) as store:
        await store.put("a", noise(64, 1))
        await evict(store)
        tier.fails.add("clear")
        await store.clear()
        await store.flush()
        assert len(tier.values) == 1
        assert await store.get("a") is None
        assert await store.contains(["a"]) == (False,)
        await store.put("b", noise(64, 2))  # that is written all the same
        await store.flush()
        assert await store.stat("b") is not None and len(tier.values) == 2
        tier.fails.clear()
        await until(lambda: not tier.values)  # it is tried again


async def test_a_tier_that_cannot_clear_is_not_asked_again(
    tier: DictTier, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened(tier) as store:
        await store.put_many([("a", noise(64, 1)), ("b", noise(64, 2))])
        await evict(store)
        tier.refuses.add("clear")
        await store.clear()
        await store.put("b", noise(64, 3))
        await evict(store)
        value = await store.get("b")
        assert value is not None and torch.equal(value, noise(64, 3))
        assert await store.get("a") is None
        # It is there, which is all that this asks.
        assert await store.contains(["a", "b", "c"]) == (True, True, False)
    assert "DictTier cannot delete all of a model" in caplog.text
    assert tier.calls["clear"] == 1


async def test_what_others_put_where_nothing_can_be_cleared_is_found(
    tier: DictTier,
) -> None:
    tier.refuses.add("clear")
    async with opened(tier) as store, opened(tier) as other:
        await store.clear()
        await store.flush()
        await other.put("a", noise(64, 1))
        await other.flush()
        assert await store.contains(["a"]) == (True,)
        assert await store.match_prefix(["a"]) == 1
        assert await store.stat("a") is not None
        value = await store.get("a")
        assert value is not None and torch.equal(value, noise(64, 1))


async def test_a_tier_that_is_away_is_told_when_it_is_back(tier: DictTier) -> None:
    async with opened(tier) as store:
        await store.put("a", noise(64, 1))
        await evict(store)
        tier.fails.add("store")
        tier.is_there = False
        for number in range(4):
            await store.put(str(number), noise(64, number))
            await store.flush()
        assert not store.statistics().tiers["DictTier"].is_storing
        await store.clear()
        assert not tier.calls["clear"] and len(tier.values) == 1
        tier.is_there = True
        await until(lambda: not tier.values)


async def test_a_store_that_ends_lets_tiers_clear_first(tier: DictTier) -> None:
    async with TieredStore(MIB, [tier]) as store:
        await store.put("a", noise(64, 1))
        await store.clear()
    assert tier.values == {}
    async with opened(tier) as store:
        assert await store.get("a") is None


async def test_what_is_held_is_read_on_and_gives_its_memory_back_then() -> None:
    async with opened() as store:
        await store.put("a", noise(64, 1), pin=True)
        async with store.pin(["a"]):
            assert await store.clear() == 1
            assert store.statistics().used_bytes > 0
        assert store.statistics().used_bytes == 0


async def test_many_values_are_let_go_of_in_many_turns() -> None:
    async with opened() as store:
        await store.put_many([(str(n), torch.empty(0)) for n in range(1000)])
        await store.put("whole", noise(MIB - 8192, 1), pin=True)
        assert await store.clear() == 1001
        assert store.statistics().keys == 0
        await store.put("whole", noise(MIB - 8192, 2), pin=True)  # it waits for room
        assert await store.clear() == 1
        await store.put_many([(str(n), torch.empty(0)) for n in range(1000)])
        await store.clear()  # and it is closed in the middle of that
