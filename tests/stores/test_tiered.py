"""A store on tiers: what memory has dropped is found, and a bad tier harms nobody."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from asynckv.abc import (
    KVStoreBuffer,
    PrefixMatch,
    TierFacts,
    TierResult,
    TierValue,
    WantedValue,
)
from asynckv.buffers.store import StoreBuffer
from asynckv.errors import BufferClosed, ConfigError
from asynckv.stores import client
from asynckv.stores.tier_stack import FlushResult
from asynckv.stores.tiered import TieredStore, open_tier
from asynckv.tensors.views import spec_of
from asynckv.testing.blocked import until, until_blocked
from asynckv.testing.cancellation import CancelMode, Outcome, sweep_cancellation
from asynckv.testing.expectations import CANCEL_MODES, noise
from asynckv.testing.store_checks import (
    CANCELLING_CHECKS,
    STORE_CHECKS,
    STORING_CHECKS,
    StoreCheck,
)
from harness.stuck_tiers import add_stuck_tiers
from harness.tiers import DictTier

MIB = 2**20


@pytest.fixture
def tier() -> DictTier:
    return DictTier()


@contextlib.asynccontextmanager
async def opened(*tiers: DictTier, max_bytes: int = MIB) -> AsyncIterator[TieredStore]:
    async with TieredStore(max_bytes, tiers, drain_s=0.2) as store:
        yield store


async def evict(store: TieredStore) -> None:
    """Let memory have room for nothing that was put before, and tiers not know why."""
    whole = noise(store.statistics().max_bytes, 99)
    await store.flush()
    await store.put("filler", whole)
    await store.flush()
    await store.delete("filler")
    await store.flush()


@pytest.mark.parametrize("check", STORE_CHECKS, ids=lambda check: check.__name__)
async def test_without_tiers_it_is_a_store_buffer(check: StoreCheck) -> None:
    async with opened(max_bytes=16 * MIB) as store:
        await check(store, store)


@pytest.mark.parametrize(
    "check", [*STORING_CHECKS, *CANCELLING_CHECKS], ids=lambda check: check.__name__
)
async def test_with_tiers_it_keeps_what_a_store_buffer_keeps(
    check: StoreCheck, tier: DictTier
) -> None:
    async with opened(tier, DictTier(), max_bytes=16 * MIB) as store:
        local: StoreBuffer = store
        client: KVStoreBuffer = store
        await check(client, local)


@pytest.mark.parametrize("nbytes", [1, 4096, 300_000])
async def test_what_memory_has_dropped_comes_back_from_a_tier(
    tier: DictTier, nbytes: int
) -> None:
    async with opened(tier) as store:
        await store.put("a", noise(nbytes, 1))
        await evict(store)
        assert torch.equal(await found(store, "a"), noise(nbytes, 1))
        assert tier.calls["fetch"] == 1
        assert torch.equal(await found(store, "a"), noise(nbytes, 1))
        assert tier.calls["fetch"] == 1


async def found(store: KVStoreBuffer, key: str) -> torch.Tensor:
    value = await store.get(key)
    assert value is not None
    return value


@pytest.mark.parametrize("nbytes", [0, 64])
async def test_what_a_tier_has_is_there_after_a_restart(
    tier: DictTier, nbytes: int
) -> None:
    async with opened(tier) as store:
        await store.put("a", noise(nbytes, 1))
        assert await store.flush() == {"DictTier": FlushResult(1, 0, 0)}
    async with opened(DictTier(tier.values)) as store:
        assert torch.equal(await found(store, "a"), noise(nbytes, 1))


async def test_a_thousand_who_miss_one_key_are_one_fetch(tier: DictTier) -> None:
    async with opened(tier) as store:
        await store.put("a", noise(64, 1))
        await evict(store)
        values = await asyncio.gather(*(store.get("a") for _ in range(1000)))
        assert all(v is not None and torch.equal(v, noise(64, 1)) for v in values)
        assert tier.calls["fetch"] == 1


async def test_who_no_longer_waits_takes_nothing_from_the_others(
    tier: DictTier,
) -> None:
    async with opened(tier) as store:
        await store.put("a", noise(64, 1))
        await evict(store)
        tier.hold("fetch")
        first, second = (asyncio.create_task(store.get("a")) for _ in range(2))
        await until(lambda: tier.calls["fetch"] == 1)
        first.cancel()
        await asyncio.wait([first])
        tier.let_go("fetch")
        value = await second
        assert value is not None
        assert torch.equal(value, noise(64, 1))


async def test_a_put_makes_void_what_is_on_its_way_from_a_tier(tier: DictTier) -> None:
    async with opened(tier) as store:
        await store.put("a", noise(64, 1))
        await evict(store)
        tier.hold("fetch")
        getting = asyncio.create_task(store.get("a"))
        await until(lambda: tier.calls["fetch"] == 1)
        await store.put("a", noise(64, 2))
        tier.let_go("fetch")
        assert torch.equal(await found(store, "a"), noise(64, 2))
        value = await getting
        assert value is not None
        assert torch.equal(value, noise(64, 2))


async def test_a_put_makes_void_that_a_tier_has_nothing(tier: DictTier) -> None:
    async with opened(tier) as store:
        tier.hold("fetch")
        getting = asyncio.ensure_future(store.get("a"))
        await until(lambda: tier.calls["fetch"] == 1)
        await store.put("a", noise(64, 1))
        assert await getting is not None
        tier.let_go("fetch")
        await until(lambda: store.statistics().tiers["DictTier"].misses == 1)
        await evict(store)
        assert await store.get("a") is not None


async def test_a_delete_makes_void_what_is_on_its_way_from_a_tier(
    tier: DictTier,
) -> None:
    async with opened(tier) as store:
        await store.put("a", noise(64, 1))
        await evict(store)
        tier.hold("fetch")
        getting = asyncio.create_task(store.get("a"))
        await until(lambda: tier.calls["fetch"] == 1)
        await store.delete("a")
        tier.let_go("fetch")
        assert await getting is None
        assert await store.get("a") is None


async def test_what_was_read_while_it_was_being_deleted_is_void(tier: DictTier) -> None:
    async with opened(tier) as store:
        await store.put("a", noise(64, 1))
        await evict(store)
        tier.hold("delete")
        await store.delete("a")
        await until(lambda: tier.calls["delete"] > 1)
        tier.hold("read")
        getting = asyncio.create_task(store.get("a"))
        await until(lambda: tier.calls["read"] == 1)
        tier.let_go("delete")
        await store.flush()
        tier.let_go("read")
        assert await getting is None


async def test_a_write_that_lands_after_a_delete_is_deleted_again(
    tier: DictTier,
) -> None:
    async with opened(tier) as store:
        tier.hold("store")
        await store.put("a", noise(64, 1))
        await until(lambda: tier.calls["store"] == 1)
        await store.delete("a")
        tier.let_go("store")
        await store.flush()
        assert tier.values == {}


async def test_a_key_is_hidden_while_a_tier_does_not_delete_it(tier: DictTier) -> None:
    async with opened(tier) as store:
        await store.put("a", noise(64, 1))
        await store.flush()
        tier.fails.add("delete")
        await store.delete("a")
        await store.flush()
        assert tier.values
        assert await store.get("a") is None
        assert await store.contains(["a"]) == (False,)


async def test_an_older_value_is_never_found_where_the_newer_was_not_written(
    tier: DictTier,
) -> None:
    async with opened(tier) as store:
        await store.put("a", noise(64, 1))
        await store.flush()
        tier.fails.add("store")
        await store.put("a", noise(64, 2))
        await evict(store)
        assert await store.get("a") is None


async def test_the_same_bytes_are_found_though_their_second_write_failed(
    tier: DictTier,
) -> None:
    async with opened(tier) as store:
        await store.put("a", noise(64, 1))
        await store.flush()
        tier.fails.add("store")
        await store.put("a", noise(64, 1))
        await evict(store)
        assert torch.equal(await found(store, "a"), noise(64, 1))


async def test_what_is_not_as_it_was_written_is_a_miss_and_the_next_tier_is_asked() -> (
    None
):
    bad, good = DictTier(), DictTier()
    bad.flips_bits = True
    async with opened(bad, good) as store:
        await store.put("a", noise(64, 1))
        await evict(store)
        assert torch.equal(await found(store, "a"), noise(64, 1))
        assert store.statistics().tiers["DictTier"].corrupt == 1


async def test_what_is_wrong_twice_is_deleted(tier: DictTier) -> None:
    tier.flips_bits = True
    async with opened(tier) as store:
        await store.put("a", noise(64, 1))
        await evict(store)
        assert await store.get("a") is None
        assert tier.values
        assert await store.get("a") is None
        await store.flush()
        assert tier.values == {}


@pytest.mark.parametrize("call", ["store", "fetch", "contains", "delete"])
@pytest.mark.parametrize("how", ["fails", "raises"])
async def test_a_tier_that_fails_is_a_tier_that_has_nothing(
    tier: DictTier, call: str, how: str
) -> None:
    async with opened(tier) as store:
        getattr(tier, how).add(call)
        await store.put("a", noise(64, 1))
        assert torch.equal(await found(store, "a"), noise(64, 1))
        await store.flush()
        assert await store.get("b") is None
        await store.contains(["a", "b"])
        await store.delete("a")
        await store.flush()
        assert await store.get("a") is None


@pytest.mark.parametrize("call", ["contains", "fetch", "store", "delete"])
async def test_a_tier_that_says_nothing_of_use_is_a_tier_that_has_nothing(
    call: str, tier: DictTier
) -> None:
    async def answer(items: Sequence[object]) -> object:
        return 5

    async with opened(tier) as store:
        await store.put("a", noise(64, 1))
        await evict(store)
        setattr(tier, call, answer)
        await store.put("b", noise(64, 2))
        assert await store.contains(["a", "b"]) == (call != "contains", True)
        assert (await store.get("a") is None) is (call == "fetch")
        await store.delete("a")
        await store.flush()
        told = store.statistics()
        assert (told.used_bytes, told.tiers["DictTier"].waiting) == (64, 0)


async def test_of_a_tier_that_does_not_tell_of_each_value_nothing_is_believed() -> None:
    class OneTooMany(DictTier):
        async def store(self, values: Sequence[TierValue]) -> Sequence[TierResult]:
            return [*await super().store(values), TierResult.DONE]

    async with opened(OneTooMany()) as store:
        await store.put("a", noise(64, 1))
        assert (await store.flush())["OneTooMany"].failed == 1


async def test_a_tier_that_is_silent_is_asked_once_and_then_no_more(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "asynckv.stores")
    tier = DictTier(facts=TierFacts(patience_s=0.05))
    async with opened(tier) as store:
        tier.hold("fetch")
        assert await store.get("a") is None
        for number in range(20):
            assert await store.get(f"b{number}") is None
        assert tier.calls["fetch"] == 1
        told = store.statistics().tiers["DictTier"]
        assert (told.late, told.is_loading, told.is_storing) == (1, False, True)
        assert caplog.text.count("DictTier is silent") == 1
        await until(lambda: store.statistics().tiers["DictTier"].is_loading)
        assert caplog.text.count("DictTier is there again") == 1
        tier.let_go("fetch")


async def test_memory_that_a_late_call_may_write_to_stays_charged() -> None:
    tier = DictTier(facts=TierFacts(patience_s=0.05))
    async with opened(tier) as store:
        await store.put("a", noise(300_000, 1))
        await evict(store)
        tier.hold("fetch")
        assert await store.get("a") is None
        assert store.statistics().used_bytes >= 300_000
        tier.let_go("fetch")
        await until(lambda: store.statistics().used_bytes == 0)


async def test_memory_that_late_calls_keep_keeps_nobody_waiting_for_a_flush(
    tier: DictTier,
) -> None:
    slow = DictTier(facts=TierFacts(patience_s=0.05))
    async with opened(slow, tier) as store:
        await store.put("a", noise(300_000, 1))
        await evict(store)
        slow.hold("fetch")
        assert await store.get("a") is None
        await store.put("b", noise(64, 1))
        await store.delete("c")
        deletes = tier.calls["delete"]
        dropped = store.statistics().tiers["DictTier'"].dropped
        assert (await store.flush())["DictTier'"].dropped == dropped == 1
        slow.let_go("fetch")
        await until(lambda: tier.calls["delete"] > deletes)


async def test_a_tier_that_was_away_is_asked_again_when_a_probe_finds_it() -> None:
    tier = DictTier()
    tier.is_there = False
    async with opened(tier) as store:
        assert not store.statistics().tiers["DictTier"].is_loading
        tier.is_there = True
        await until(lambda: store.statistics().tiers["DictTier"].is_loading)
        await store.put("a", noise(64, 1))
        assert (await store.flush())["DictTier"].accepted == 1


async def test_a_call_that_does_not_end_keeps_nobody_waiting_for_a_flush() -> None:
    tier = DictTier(facts=TierFacts(patience_s=0.05))
    async with opened(tier) as store:
        tier.hold("store")
        await store.put("a", noise(64, 1))
        await until(lambda: not store.statistics().tiers["DictTier"].is_storing)
        held = tier.let_others_go("store")
        await until(lambda: store.statistics().tiers["DictTier"].is_storing)
        await store.put("b", noise(64, 2))
        assert (await store.flush())["DictTier"].accepted == 1
        held.set()
        await until(lambda: len(tier.values) == 2)


async def test_a_tier_that_does_not_answer_keeps_no_store_from_being_opened(
    monkeypatch: pytest.MonkeyPatch, tier: DictTier
) -> None:
    monkeypatch.setattr(client, "_OPEN_S", 0.05)
    tier.hold("probe")
    async with opened(tier) as store:
        assert not store.statistics().tiers["DictTier"].is_loading
        assert await store.get("a") is None
        tier.let_go("probe")
        await until(lambda: store.statistics().tiers["DictTier"].is_loading)
    assert tier.is_closed


async def test_an_answer_to_a_probe_counts_however_late_it_is(
    monkeypatch: pytest.MonkeyPatch, tier: DictTier
) -> None:
    monkeypatch.setattr(client, "_OPEN_S", 0.05)
    tier.hold("probe")
    async with opened(tier) as store:
        tier.let_go("probe")
        tier.hold("probe")
        await until(lambda: store.statistics().tiers["DictTier"].is_loading)
        tier.let_go("probe")


async def test_a_tier_that_refuses_when_it_is_open_already_is_said_to_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Refusing(DictTier):
        async def probe(self) -> TierFacts:
            await super().probe()
            raise ConfigError("not like this")

    monkeypatch.setattr(client, "_OPEN_S", 0.05)
    tier = Refusing()
    tier.hold("probe")
    async with opened(tier):
        tier.let_go("probe")
        await until(lambda: tier.calls["probe"] > 1)
    assert caplog.text.count("not like this") == 1


async def test_a_queue_that_is_full_drops_and_the_put_does_not_wait(
    tier: DictTier,
) -> None:
    async with opened(tier) as store:
        tier.hold("store")
        for number in range(8):
            await store.put(f"a{number}", noise(100_000, number))
        assert store.statistics().tiers["DictTier"].dropped > 0
        tier.let_go("store")
        told = (await store.flush())["DictTier"]
        assert told.accepted + told.dropped == 8


async def test_what_waits_for_a_tier_is_written_before_the_end(tier: DictTier) -> None:
    async with opened(tier) as store:
        for number in range(8):
            await store.put(f"a{number}", noise(64, number))
    assert len(tier.values) == 8
    assert tier.is_closed


async def test_a_tier_that_never_ends_keeps_nobody_from_closing() -> None:
    tier = DictTier(facts=TierFacts(patience_s=0.05))
    async with opened(tier) as store:
        tier.hold("store")
        await store.put("a", noise(64, 1))
    tier.let_go("store")


async def test_values_are_written_at_their_second_use_where_that_was_asked_for(
    tier: DictTier,
) -> None:
    async with TieredStore(MIB, [tier], admit="second_use") as store:
        await store.put("a", noise(64, 1))
        await store.put("b", noise(64, 2))
        await store.get("a")
        await store.flush()
        assert len(tier.values) == 1


async def test_what_connectors_say_of_themselves_stays_in_memory(
    tier: DictTier,
) -> None:
    async with opened(tier) as store:
        await store.put("asynckv/shape", noise(64, 1))
        await store.flush()
        assert await found(store, "asynckv/shape") is not None
        assert await store.delete("asynckv/shape")
        await store.flush()
        assert await store.get("asynckv/shape") is None
        assert not tier.calls["store"] + tier.calls["delete"] + tier.calls["fetch"]


async def test_what_a_full_queue_has_dropped_is_written_when_it_is_used_again(
    tier: DictTier,
) -> None:
    async with opened(tier) as store:
        tier.hold("store")
        keys = [f"key {number}" for number in range(8)]
        for seed, key in enumerate(keys):
            await store.put(key, noise(40_000, seed))
        dropped = store.statistics().tiers["DictTier"].dropped
        await store.get_many(keys)  # there is no room yet
        assert store.statistics().tiers["DictTier"].dropped == dropped > 0
        tier.let_go("store")
        while len(tier.values) < 8:
            await store.flush()
            stored = len(tier.values)
            await store.get_many(keys)
            await store.flush()
            assert len(tier.values) > stored
        accepted = store.statistics().tiers["DictTier"].accepted
        await store.get_many(keys)
        await store.flush()
        assert store.statistics().tiers["DictTier"].accepted == accepted == 8


async def test_what_was_dropped_and_put_anew_is_written_as_it_is_now(
    tier: DictTier,
) -> None:
    async with opened(tier) as store:
        tier.hold("store")
        await store.put("filler", noise(100_000, 1))
        await store.put("a", noise(100_000, 2))
        tier.let_go("store")
        await store.flush()
        await store.put("a", noise(100_000, 3))
        await found(store, "a")
        await store.flush()
    async with opened(DictTier(tier.values)) as store:
        assert torch.equal(await found(store, "a"), noise(100_000, 3))


async def test_a_time_to_live_goes_on_in_a_tier_and_after_a_restart(
    tier: DictTier,
) -> None:
    async with opened(tier) as store:
        await store.put("a", noise(64, 1), ttl_s=0.05)
        await store.put("b", noise(64, 2), ttl_s=600)
        await evict(store)
        await found(store, "b")
        await asyncio.sleep(0.06)  # there is nothing to wait for but the clock
        assert await store.get("a") is None
    async with opened(DictTier(tier.values)) as store:
        assert await store.get("a") is None
        await found(store, "b")


async def test_namespaces_and_models_do_not_meet(tier: DictTier) -> None:
    async with TieredStore(MIB, [tier], namespace="one", fingerprint="m") as store:
        await store.put("a", noise(64, 1))
    for other in (
        TieredStore(MIB, [tier], namespace="two", fingerprint="m"),
        TieredStore(MIB, [tier], namespace="one", fingerprint="n"),
    ):
        async with other as store:
            assert await store.get("a") is None
            assert await store.contains(["a"]) == (False,)


async def test_a_pin_brings_what_is_far_and_says_what_is_nowhere(
    tier: DictTier,
) -> None:
    async with opened(tier) as store:
        await store.put("a", noise(64, 1))
        await evict(store)
        async with store.pin(["a", "b"]) as has:
            assert has == (True, False)
            tier.values.clear()
            await store.put("filler", noise(MIB - 8192, 3))
            assert torch.equal(await found(store, "a"), noise(64, 1))


async def far_values(store: TieredStore, count: int) -> list[str]:
    """Put values that only tiers have then, and return their keys."""
    keys = [f"far {number}" for number in range(count)]
    await store.put_many([(key, noise(64, seed)) for seed, key in enumerate(keys)])
    await evict(store)
    return keys


async def test_many_gets_at_once_find_all_though_memory_has_room_for_few(
    tier: DictTier,
) -> None:
    async with opened(tier) as store:
        keys = [f"far {number}" for number in range(32)]
        for seed, key in enumerate(keys):
            await store.put(key, noise(MIB // 8, seed))
            await store.flush()
        values = await store.get_many(keys)
        for seed, value in enumerate(values):
            assert value is not None
            assert torch.equal(value, noise(MIB // 8, seed))


async def test_of_a_prefix_that_is_too_long_a_pin_holds_the_beginning(
    tier: DictTier,
) -> None:
    async with opened(tier) as store:
        keys = [f"far {number}" for number in range(40)]
        for seed, key in enumerate(keys):
            await store.put(key, noise(MIB // 20, seed))
            await store.flush()
        async with store.pin(keys) as there:
            assert (*there, False).index(False) >= 16
            assert sum(there) <= 20


async def test_who_asks_for_what_others_gave_up_finds_it(tier: DictTier) -> None:
    async with opened(tier) as store:
        keys = await far_values(store, 6)
        tier.hold("fetch")
        others = [asyncio.create_task(store.get(key)) for key in keys]
        await until(lambda: tier.calls["fetch"] == 4)
        others[5].cancel()
        await asyncio.wait([others[5]])
        again = asyncio.create_task(store.get(keys[5]))
        await until_blocked(again)
        tier.let_go("fetch")
        assert await again is not None
        await asyncio.gather(*others[:5])


@pytest.mark.parametrize("ticks", range(4))
async def test_a_change_and_the_end_in_one_turn_leave_nobody_waiting(
    tier: DictTier, ticks: int
) -> None:
    async with opened(tier) as store:
        (key,) = await far_values(store, 1)
        tier.hold("fetch")
        getting = asyncio.create_task(store.get(key))
        for _ in range(ticks):
            await asyncio.sleep(0)
        store.values.remove(key, None)
        store.abort()
        with pytest.raises(BufferClosed):
            async with asyncio.timeout(5):
                await getting
        tier.let_go("fetch")


async def test_a_pin_takes_what_has_come_in_time(tier: DictTier) -> None:
    async with opened(tier) as store:
        keys = await far_values(store, 2)
        await found(store, keys[0])
        tier.hold("fetch")
        async with store.pin(keys, within_s=0.01) as there:
            assert there == (True, False)
        tier.let_go("fetch")
        async with store.pin(keys, within_s=30) as there:
            assert there == (True, True)


async def test_what_nobody_waits_for_any_more_is_not_begun(tier: DictTier) -> None:
    async with opened(tier) as store:
        keys = await far_values(store, 16 * 6)
        tier.hold("fetch")
        async with store.pin(keys, within_s=0.01) as there:
            assert not any(there)
        begun = tier.calls["fetch"]
        tier.let_go("fetch")
        await found(store, keys[-1])  # it is last in line
        assert begun < 6
        assert tier.calls["fetch"] == begun + 1


async def test_what_was_fetched_and_never_read_is_the_first_to_go(
    tier: DictTier,
) -> None:
    async with opened(tier) as store:
        await store.put("read", noise(MIB // 4, 1))
        await store.put("unread", noise(MIB // 4, 2))
        await evict(store)
        await store.put("old", noise(MIB // 4, 3))
        async with store.pin(["read", "unread"]) as there:
            assert all(there)
            await found(store, "read")
        tier.values.clear()
        await store.put("new", noise(MIB // 2, 4))
        there = await store.contains(["old", "read", "unread"])
        assert there == (True, True, False)


async def test_while_there_is_no_room_a_few_wait_for_it_and_not_everybody(
    tier: DictTier,
) -> None:
    async with opened(tier) as store:
        keys = await far_values(store, 12)
        await store.put("all", noise(MIB, 9))
        async with store.pin(["all"]):
            waits = store.statistics().room_waits
            assert await store.get_many(keys) == (None,) * 12
            assert store.statistics().room_waits <= waits + 4
        assert await found(store, keys[0]) is not None


async def test_what_makes_its_room_by_dropping_many_has_it_though_room_was_scarce(
    tier: DictTier,
) -> None:
    async with opened(tier) as store:
        await store.put("large", noise(MIB // 2, 1))
        await evict(store)
        small = [f"small {number}" for number in range(1000)]
        for key in small:
            await store.put(key, noise(1024, 2))
        async with store.pin(small):
            assert await store.get("large") is None
        assert await store.get("large") is not None


@pytest.mark.parametrize("ticks", range(4))
async def test_who_waits_for_a_tier_hears_of_the_end_of_the_store(
    tier: DictTier, ticks: int
) -> None:
    async with opened(tier) as store:
        await far_values(store, 1)
        tier.hold("fetch")
        getting = asyncio.create_task(store.get("far 0"))
        for _ in range(ticks):
            await asyncio.sleep(0)
        store.abort()
        with pytest.raises(BufferClosed):
            async with asyncio.timeout(5):
                await getting
        tier.let_go("fetch")


async def test_a_stat_says_which_tiers_have_a_value(tier: DictTier) -> None:
    async with opened(tier) as store:
        (key,) = await far_values(store, 1)
        far = await store.stat(key)
        assert far is not None
        assert (far.tiers, far.spec) == (("DictTier",), None)
        await found(store, key)
        near = await store.stat(key)
        assert near is not None
        assert near.tiers == ("memory", "DictTier")
        assert near.spec == spec_of(noise(64, 0))


async def test_a_prefix_is_found_over_all_tiers_and_it_says_where() -> None:
    near, far = DictTier(), DictTier()
    async with opened(near, far) as store:
        for key in "abcd":
            await store.put(key, noise(64, 1))
        await evict(store)
        await found(store, "a")
        near.values = {k: v for k, v in near.values.items() if b"key\xa1b" in v}
        match = await store.match_prefix(["a", "b", "c", "x", "d"])
        assert match == 3
        assert match.ready == 1
        assert match.by_tier == {"memory": 1, "DictTier": 1, "DictTier'": 1}


def test_a_prefix_of_nothing_is_nothing() -> None:
    assert PrefixMatch([]).ready == PrefixMatch([None, "memory"]) == 0


async def test_a_get_that_is_cancelled_brings_the_value_for_the_next_one(
    tier: DictTier,
) -> None:
    async with opened(tier) as store:
        await store.put("a", noise(64, 1))
        await evict(store)
        getting = asyncio.create_task(store.get("a"))
        await until_blocked(getting)
        getting.cancel()
        await asyncio.wait([getting])
        assert torch.equal(await found(store, "a"), noise(64, 1))
        assert tier.calls["fetch"] == 1


async def test_a_flush_waits_for_puts_before_it_and_for_none_after(
    tier: DictTier,
) -> None:
    async with opened(tier) as store:
        tier.hold("store")
        await store.put("a", noise(64, 1))
        await until(lambda: tier.calls["store"] == 1)
        flushing = asyncio.create_task(store.flush())
        await until_blocked(flushing)
        await store.put("b", noise(64, 2))
        tier.let_go("store")
        tier.hold("store")
        async with asyncio.timeout(5):
            assert (await flushing)["DictTier"].accepted == 1
        tier.let_go("store")


async def test_a_tier_that_refuses_closes_those_that_were_opened(
    tier: DictTier,
) -> None:
    class Refusing(DictTier):
        async def probe(self) -> TierFacts:
            raise ConfigError("not like this")

    with pytest.raises(ConfigError, match="not like this"):
        async with TieredStore(MIB, [tier, Refusing()]):
            pass
    assert tier.is_closed


async def test_an_abort_closes_the_tiers(tier: DictTier) -> None:
    async with opened(tier) as store:
        store.abort()
        assert tier.is_closed


async def test_what_was_to_be_written_after_loads_is_let_go_of_by_an_abort(
    tier: DictTier,
) -> None:
    async with opened(tier) as store:
        tier.hold("fetch")
        getting = asyncio.ensure_future(store.get("a"))
        await until(lambda: tier.calls["fetch"] == 1)
        await store.put("b", noise(64, 1))
        await asyncio.sleep(0)
        store.abort()
        tier.let_go("fetch")
        with contextlib.suppress(BufferClosed):
            await getting
        await until(lambda: store.statistics().used_bytes == 0)


@pytest.mark.parametrize("call", ["abort", "aclose"])
async def test_a_tier_that_fails_to_close_keeps_nothing_else_open(
    call: str, tier: DictTier
) -> None:
    class NeverCloses(DictTier):
        def abort(self) -> None:
            raise RuntimeError("it does not close")

    async with opened(NeverCloses(), tier) as store:
        await store.put("a", noise(64, 1))
        ending = getattr(store, call)()
        if call == "aclose":
            await ending
        assert tier.is_closed
        await until(lambda: store.statistics().used_bytes == 0)


async def test_a_call_that_is_late_before_it_found_anything_is_lent_nothing() -> None:
    class SlowToFind(DictTier):
        async def fetch(self, wanted: Sequence[WantedValue]) -> Sequence[TierResult]:
            await self._enter("find")
            return await super().fetch(wanted)

    tier = SlowToFind(facts=TierFacts(patience_s=0.05))
    async with opened(tier) as store:
        await store.put("a", noise(300_000, 1))
        await evict(store)
        tier.hold("find")
        assert await store.get("a") is None
        tier.hold("fetch")
        tier.let_go("find")
        await until(lambda: tier.calls["fetch"] == 1)
        assert store.statistics().used_bytes == 0
        tier.let_go("fetch")


async def test_what_a_prefix_has_in_tiers_is_touched_there(tier: DictTier) -> None:
    async with opened(tier) as store:
        await store.put("a", noise(64, 1))
        await evict(store)
        await store.match_prefix(["a", "b"])
        await until(lambda: tier.touched == list(tier.values))


@pytest.mark.parametrize("call", ["open", "aclose"])
async def test_a_store_is_open_or_closed_wherever_that_is_cancelled(call: str) -> None:
    stores: list[TieredStore] = []
    tiers: list[DictTier] = []

    async def before() -> None:
        tiers.append(DictTier())
        stores.append(TieredStore(MIB, [tiers[-1]], drain_s=0.2))
        if call == "aclose":
            await stores[-1].open()
            await stores[-1].put("a", noise(64, 1))

    async def check(k: int, mode: CancelMode, outcome: Outcome[object]) -> None:
        if call == "open" and not outcome.cancelled:
            await stores[-1].put("a", noise(64, 1))
        await stores[-1].aclose()
        assert tiers[-1].is_closed
        with pytest.raises(BufferClosed):
            await stores[-1].get("a")

    await sweep_cancellation(
        lambda: getattr(stores[-1], call)(), check, before=before, modes=CANCEL_MODES
    )


@pytest.mark.parametrize("is_far", [False, True])
async def test_a_cancelled_get_leaves_no_trace_wherever_it_is_cancelled(
    tier: DictTier, is_far: bool
) -> None:
    value = noise(300_000, 1)
    async with opened(tier) as store:

        async def before() -> None:
            await store.put("a", value)
            if is_far:
                await evict(store)

        async def check(k: int, mode: CancelMode, outcome: Outcome[object]) -> None:
            assert torch.equal(await found(store, "a"), value)
            await store.delete("a")
            await store.flush()
            await until(lambda: store.statistics().used_bytes == 0)

        await sweep_cancellation(
            lambda: store.get("a"), check, before=before, modes=CANCEL_MODES
        )


@pytest.mark.parametrize("call", ["flush", "match_prefix", "contains"])
async def test_a_cancelled_question_leaves_no_trace_wherever_it_is_cancelled(
    tier: DictTier, call: str
) -> None:
    async with opened(tier) as store:

        async def before() -> None:
            await store.put("a", noise(64, 1))

        async def check(k: int, mode: CancelMode, outcome: Outcome[object]) -> None:
            await store.flush()
            assert len(tier.values) == 1
            assert await store.match_prefix(["a", "b"]) == 1

        ask = {
            "flush": store.flush,
            "match_prefix": lambda: store.match_prefix(["b", "a"]),
            "contains": lambda: store.contains(["a", "b"]),
        }[call]
        await sweep_cancellation(ask, check, before=before, modes=CANCEL_MODES)


def test_a_tier_that_nobody_knows_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="floppy"):
        open_tier("floppy:///dev/fd0")
    with pytest.raises(
        ConfigError, match=r"'/var/kv' is no URL .*disk:///var/kv\?max="
    ):
        open_tier("/var/kv")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tiers": "disk:///kv?max=1GiB"}, r"tiers is a list of URLs and StoreTiers"),
        ({"tiers": None}, r"tiers is a list of URLs and StoreTiers"),
        ({"tiers": [Path("/kv")]}, r"a tier is a URL or a StoreTier, not PosixPath"),
        ({"tiers": [DictTier]}, r"a tier is a URL or a StoreTier, not <class"),
        ({"namespace": None}, r"namespace is a str, not None"),
    ],
)
def test_what_is_no_tier_is_refused_where_it_is_said(
    options: dict[str, Any], words: str
) -> None:
    with pytest.raises(TypeError, match=words):
        TieredStore(MIB, **{"tiers": [], **options})


@pytest.fixture
def other_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add_stuck_tiers(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)


async def test_another_package_s_tier_is_looked_for_beside_the_loop(
    other_package: None,
) -> None:
    # On the loop, reading files would fail.
    async with TieredStore(MIB, ["stuck://?how=task&call=touch"]) as store:
        assert set(store.statistics().tiers) == {"stuck"}


async def test_a_store_that_two_open_at_once_is_opened_once(tmp_path: Path) -> None:
    store = TieredStore(MIB, [f"disk://{tmp_path}/kv?max=1MiB"])
    await asyncio.gather(store.open(), store.open())
    await store.put("a", noise(64, 1))
    assert (await store.flush())["disk"].accepted == 1
    await store.aclose()


class Miscounting(DictTier):
    def counts(self) -> Mapping[str, float]:
        raise RuntimeError("it has forgotten how")


async def test_a_tier_that_cannot_count_is_told_of_without_and_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with opened(Miscounting()) as store:
        for _ in range(2):
            assert store.statistics().tiers["Miscounting"].counts == {}
    assert caplog.text.count("does not tell what it has counted") == 1


async def test_a_store_that_is_closed_while_it_is_opened_closes_its_tiers() -> None:
    tier = DictTier()
    tier.hold("probe")
    store = TieredStore(MIB, [tier])
    opening = asyncio.create_task(store.open())
    await until(lambda: tier.calls["probe"] == 1)
    store.abort()
    tier.let_go("probe")
    with pytest.raises(BufferClosed):
        await opening
    assert tier.is_closed


async def test_a_closed_store_cannot_be_entered_again() -> None:
    async with opened(DictTier()) as store:
        pass
    with pytest.raises(BufferClosed):
        await store.__aenter__()


def test_an_admission_that_nobody_knows_is_refused() -> None:
    with pytest.raises(ValueError, match="sometimes"):
        TieredStore(MIB, [], admit="sometimes")  # type: ignore[arg-type]


@pytest.mark.parametrize("drain_s", [math.nan, -1])
def test_a_drain_that_is_no_time_is_refused(drain_s: float) -> None:
    with pytest.raises(ValueError, match="drain_s is a number of seconds"):
        TieredStore(MIB, [], drain_s=drain_s)


class ReplacedTier(DictTier):
    """Finds another value in place of the one that it has begun to read."""

    async def fetch(self, wanted: Sequence[WantedValue]) -> Sequence[TierResult]:
        for one in wanted:
            await one.place(self.values[one.key])
        return await super().fetch(wanted)


async def test_memory_of_a_value_that_was_replaced_is_given_back() -> None:
    tier = ReplacedTier()
    async with opened(tier) as store:
        await store.put("a", noise(400_000, 1))
        await evict(store)
        assert await store.get("a") is not None
        await store.put("b", noise(500_000, 2))
        # There is room for both in memory, and for no third.
        assert (await store.match_prefix(["a", "b"])).ready == 2
