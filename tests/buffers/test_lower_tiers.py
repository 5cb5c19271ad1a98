"""A store on tiers, served: its peers find what memory has dropped."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import pytest
import torch

import asynckv
from asynckv import KVStoreBuffer, PeerLost, TieredStore
from asynckv.testing import CancelMode, Outcome, sweep_cancellation, until
from asynckv.testing.expectations import CANCEL_MODES, noise
from asynckv.testing.store_checks import CANCELLING_CHECKS, STORING_CHECKS, StoreCheck
from harness.tiers import DictTier

MIB = 2**20
VALUE = noise(300_000, 1)


@pytest.fixture
def tier() -> DictTier:
    return DictTier()


@contextlib.asynccontextmanager
async def served(
    tier: DictTier, max_bytes: int = MIB
) -> AsyncIterator[tuple[asynckv.Peer, TieredStore]]:
    async with (
        TieredStore(max_bytes, [tier], drain_s=0.2) as store,
        asynckv.serve("tcp://127.0.0.1:0", store=store) as server,
        asynckv.connect(server.url) as peer,
    ):
        yield peer, store


async def put_far(peer: asynckv.Peer, store: TieredStore) -> None:
    """Put a value which only the tier has then."""
    await peer.store.put("a", VALUE)
    await store.flush()
    await peer.store.put("filler", noise(store.statistics().max_bytes, 2))
    await peer.store.delete("filler")
    await store.flush()


@pytest.mark.parametrize(
    "check", [*STORING_CHECKS, *CANCELLING_CHECKS], ids=lambda check: check.__name__
)
async def test_it_keeps_what_a_store_buffer_keeps(
    check: StoreCheck, tier: DictTier
) -> None:
    async with served(tier, 16 * MIB) as (peer, store):
        await check(peer.store, store)


async def get(store: KVStoreBuffer) -> None:
    value = await store.get("a")
    assert value is not None
    assert torch.equal(value, VALUE)


async def pin(store: KVStoreBuffer) -> None:
    async with store.pin(["b", "a"]) as has:
        assert has == (False, True)


async def contains(store: KVStoreBuffer) -> None:
    assert await store.contains(["b", "a"]) == (False, True)


async def match_prefix(store: KVStoreBuffer) -> None:
    assert await store.match_prefix(["a", "b"]) == 1


async def stat(store: KVStoreBuffer) -> None:
    told = await store.stat("a")
    assert told is not None
    assert told.tiers[-1] == "DictTier"
    assert await store.stat("b") is None


async def delete(store: KVStoreBuffer) -> None:
    assert await store.delete("a")
    assert not await store.delete("a")


async def put_none(store: KVStoreBuffer) -> None:
    await store.put("a", None)
    assert await store.contains(["a"]) == (False,)


Ask = Callable[[KVStoreBuffer], Coroutine[Any, Any, None]]
ASKS = (get, pin, contains, match_prefix, stat)
ENDS = (delete, put_none)


@pytest.mark.parametrize("ask", [*ASKS, *ENDS])
@pytest.mark.parametrize("is_remote", [True, False])
async def test_a_peer_and_the_store_itself_find_what_only_a_tier_has(
    ask: Ask, is_remote: bool, tier: DictTier
) -> None:
    async with served(tier) as (peer, store):
        await put_far(peer, store)
        await ask(peer.store if is_remote else store)


async def test_what_only_a_tier_has_is_cleared_too(tier: DictTier) -> None:
    async with served(tier) as (peer, store):
        await put_far(peer, store)
        assert await peer.store.clear() == 0
        assert await peer.store.get("a") is None
        await store.flush()
        assert tier.values == {}


@pytest.mark.parametrize("end", ENDS)
async def test_a_delete_of_what_is_far_may_be_cancelled_anywhere(
    end: Ask, tier: DictTier
) -> None:
    async with served(tier) as (peer, store):

        async def check(k: int, mode: CancelMode, outcome: Outcome[None]) -> None:
            value = await peer.store.get("a")
            assert outcome.cancelled or value is None
            await store.flush()

        await sweep_cancellation(
            lambda: end(peer.store),
            check,
            before=lambda: put_far(peer, store),
            modes=CANCEL_MODES,
        )


async def test_a_peer_is_told_the_nearest_tier_of_each_block(tier: DictTier) -> None:
    async with served(tier) as (peer, store):
        await put_far(peer, store)
        await peer.store.put("b", VALUE)
        match = await peer.store.match_prefix(["b", "a", "c"])
        assert (match, match.ready) == (2, 1)
        assert match.by_tier == {"memory": 1, "DictTier": 1}


async def test_a_pin_at_a_peer_takes_what_has_come_in_time(tier: DictTier) -> None:
    async with served(tier) as (peer, store):
        await put_far(peer, store)
        tier.hold("fetch")
        for within_s in (0.01, 0.0):
            async with peer.store.pin(["a"], within_s=within_s) as has:
                assert has == (False,)
        tier.let_go("fetch")
        async with peer.store.pin(["a"], within_s=30.0) as has:
            assert has == (True,)


async def test_a_pin_at_a_peer_brings_more_keys_than_are_asked_for_at_once(
    tier: DictTier,
) -> None:
    async with served(tier) as (peer, store):
        await put_far(peer, store)
        near = [f"near {number}" for number in range(40)]
        await peer.store.put_many([(key, noise(100, 1)) for key in near])
        async with peer.store.pin([*near, "a", "nowhere"]) as has:
            assert has == (*[True] * 41, False)


async def test_of_a_prefix_nothing_is_fetched_long_after_the_first_gap(
    tier: DictTier,
) -> None:
    async with served(tier) as (peer, store):
        await put_far(peer, store)
        near = [f"near {number}" for number in range(40)]
        await peer.store.put_many([(key, noise(100, 1)) for key in near])
        for there in (20, 7):
            await peer.store.delete(near[there])
            async with peer.store.pin([*near, "a"], prefix=True) as has:
                assert has == (*[True] * there, *[False] * (41 - there))
            told = await peer.store.stat("a")
            assert told is not None and told.tiers == ("DictTier",)
        async with peer.store.pin([near[0], "a", "b", "a"], prefix=True) as has:
            assert has == (True, True, False, False)


@pytest.mark.parametrize("ask", ASKS)
async def test_a_question_about_far_values_may_be_cancelled_anywhere(
    ask: Ask, tier: DictTier
) -> None:
    async with served(tier) as (peer, store):

        async def check(k: int, mode: CancelMode, outcome: Outcome[None]) -> None:
            await get(peer.store)
            await peer.store.delete("a")
            await store.flush()
            await until(lambda: store.statistics().used_bytes == 0)

        await sweep_cancellation(
            lambda: ask(peer.store),
            check,
            before=lambda: put_far(peer, store),
            modes=CANCEL_MODES,
        )


async def test_a_link_that_is_lost_while_a_value_is_brought_harms_nobody_else(
    tier: DictTier,
) -> None:
    async with served(tier) as (peer, store):
        await put_far(peer, store)
        tier.hold("fetch")
        getting = asyncio.create_task(peer.store.get("a"))
        await until(lambda: tier.calls["fetch"] == 1)
        peer.abort()
        with pytest.raises((PeerLost, asynckv.BufferClosed)):
            await getting
        tier.let_go("fetch")
        await get(store)
        await until(lambda: store.statistics().pinned_bytes == 0)


async def test_many_peers_that_miss_one_key_are_one_fetch(tier: DictTier) -> None:
    async with served(tier) as (peer, store):
        await put_far(peer, store)
        await asyncio.gather(*(get(peer.store) for _ in range(50)))
        assert tier.calls["fetch"] == 1


async def begun_far(
    tier: DictTier, link_of: asynckv.Peer, store: TieredStore
) -> asyncio.Task[torch.Tensor | None]:
    """Ask for a value that the tier does not give yet."""
    await put_far(link_of, store)
    tier.hold("fetch")
    getting = asyncio.create_task(link_of.store.get("a"))
    await until(lambda: tier.calls["fetch"] == 1)
    return getting


async def test_a_store_that_closes_meanwhile_says_so(tier: DictTier) -> None:
    async with served(tier) as (peer, store):
        getting = await begun_far(tier, peer, store)
        store.values.close()
        tier.let_go("fetch")
        with pytest.raises(asynckv.BufferClosed):
            await getting


async def test_a_pin_of_what_was_far_ends_with_its_link(tier: DictTier) -> None:
    async with served(tier) as (peer, store):
        await put_far(peer, store)
        with contextlib.suppress(asynckv.LeaseLost):  # where it has heard in time
            async with peer.store.pin(["a"]) as has:
                assert has == (True,)
                peer.abort()
        await until(lambda: not store.statistics().pinned_bytes)
