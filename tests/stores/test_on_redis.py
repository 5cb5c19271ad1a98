"""A store on a real Redis: what others have put, and a server that is in trouble."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch

import asynckv
from asynckv.stores.redis import RedisTier
from asynckv.stores.tiered import TieredStore, open_tier
from asynckv.testing.blocked import until
from asynckv.testing.expectations import noise
from asynckv.testing.store_checks import CANCELLING_CHECKS, STORING_CHECKS, StoreCheck
from harness.redis_servers import RedisProcess, running_redis
from harness.slow_lines import line_to

MIB = 2**20
PATIENT_S = 20.0
"""For tests that are of something else than a server's silence, on a busy machine."""


@pytest.fixture
async def server(tmp_path: Path, redis_program: None) -> AsyncIterator[RedisProcess]:
    async with running_redis(tmp_path) as server:
        yield server


@contextlib.asynccontextmanager
async def opened(
    url: str, max_bytes: int = 16 * MIB, patience_s: float = PATIENT_S
) -> AsyncIterator[TieredStore]:
    tier = RedisTier(f"{url}?patience_s={patience_s}")
    async with TieredStore(max_bytes, [tier], drain_s=0.2) as store:
        yield store


async def forget(store: TieredStore) -> None:
    """Let memory have room for nothing that was put before."""
    await store.flush()
    await store.put("filler", noise(store.statistics().max_bytes, 99))
    await store.flush()
    await store.delete("filler")
    await store.flush()


@pytest.mark.parametrize(
    "check", [*STORING_CHECKS, *CANCELLING_CHECKS], ids=lambda check: check.__name__
)
async def test_on_redis_it_keeps_what_a_store_buffer_keeps(
    check: StoreCheck, server: RedisProcess
) -> None:
    async with opened(server.url) as store:
        await check(store, store)


async def test_what_redis_has_accepted_is_found_by_the_next_process_by_its_url(
    server: RedisProcess,
) -> None:
    async with TieredStore(16 * MIB, [f"{server.unix_url}?patience_s=20"]) as store:
        await store.put("a", noise(MIB, 1))
        assert (await store.flush())["redis+unix"].accepted == 1
    async with TieredStore(16 * MIB, [f"{server.url}?patience_s=20"]) as store:
        assert list(await store.contains(["a", "b"])) == [True, False]
        found = await store.get("a")
        assert found is not None
        assert torch.equal(found, noise(MIB, 1))


async def test_two_stores_on_one_redis_find_what_the_other_has_put(
    server: RedisProcess,
) -> None:
    async with opened(server.url) as one, opened(server.url) as two:
        for number, (store, other) in enumerate([(one, two), (two, one)] * 3):
            value = noise(MIB + number, number)
            await store.put(f"k{number}", value)
            await store.flush()
            found = await other.get(f"k{number}")
            assert found is not None
            assert torch.equal(found, value)
        assert await one.match_prefix([f"k{number}" for number in range(8)]) == 6


async def test_more_than_memory_holds_comes_back(server: RedisProcess) -> None:
    values = [noise(3 * MIB + number, number) for number in range(12)]
    async with opened(server.url) as store:
        for number, value in enumerate(values):
            await store.put(f"k{number}", value)
            await store.flush()
        for number, value in enumerate(values):
            found = await store.get(f"k{number}")
            assert found is not None
            assert torch.equal(found, value)


async def test_what_was_damaged_there_is_a_miss_and_deleted_the_second_time(
    server: RedisProcess,
) -> None:
    async with opened(server.url) as store:
        await store.put("a", noise(MIB, 1))
        await forget(store)
        (key,) = [one async for one in keys_in(server)]
        await change_byte(server, key, MIB // 2)
        for _ in range(2):
            assert await store.get("a") is None
        await store.flush()
        assert not [one async for one in keys_in(server)]
        assert next(iter(store.statistics().tiers.values())).corrupt == 2


async def keys_in(server: RedisProcess) -> AsyncIterator[bytes]:
    import redis.asyncio

    async with redis.asyncio.Redis.from_url(server.url) as client:
        for key in await client.keys():
            yield key


async def change_byte(server: RedisProcess, key: bytes, at: int) -> None:
    import redis.asyncio

    async with redis.asyncio.Redis.from_url(server.url) as client:
        byte = (await client.getrange(key, at, at))[0]
        await client.setrange(key, at, bytes([byte ^ 1]))


async def test_a_frozen_server_costs_its_deadline_once_and_is_used_when_it_is_back(
    server: RedisProcess,
) -> None:
    async with opened(server.url, patience_s=0.3) as store:
        for number in range(8):
            await store.put(f"k{number}", noise(MIB, number))
        await forget(store)
        server.freeze()
        began = time.monotonic()
        found = await asyncio.gather(*(store.get(f"k{k}") for k in range(8)))
        assert found == [None] * 8
        assert time.monotonic() - began < 2
        late = store.statistics().tiers["RedisTier"].late
        for _ in range(100):
            assert await store.get("k0") is None
        tier = store.statistics().tiers["RedisTier"]
        assert not tier.is_loading
        assert tier.late == late >= 1  # nothing more was waited for
        await store.put("new", noise(MIB, 50))
        async with asyncio.timeout(2):
            await store.flush()
        assert not store.statistics().tiers["RedisTier"].is_storing
        server.thaw()
        await until(lambda: store.statistics().tiers["RedisTier"].is_loading)
        found_again = await store.get("k0")
        assert found_again is not None


async def test_a_store_opens_without_its_server_and_uses_it_when_it_comes(
    server: RedisProcess,
) -> None:
    await server.kill()
    async with opened(server.url) as store:
        await store.put("a", noise(MIB, 1))
        assert (await store.flush())["RedisTier"].dropped == 1
        await server.start()
        await until(lambda: store.statistics().tiers["RedisTier"].is_storing)
        await store.put("b", noise(MIB, 2))
        assert (await store.flush())["RedisTier"].accepted == 1


async def test_a_healthy_line_of_100_megabit_opens_no_breaker(
    server: RedisProcess,
) -> None:
    async with line_to(server.port) as line:
        line.rate = 12.5e6
        url = f"redis://127.0.0.1:{line.port}"
        async with opened(url, 32 * MIB, patience_s=0.3) as store:
            values = {f"k{k}": noise(MIB, k) for k in range(6)}
            for number, (key, value) in enumerate(values.items()):
                await store.put(key, value)
                if number % 3 == 2:  # no more than may wait
                    await store.flush()
            assert (await store.flush())["RedisTier"].accepted == 6
            line.rate = None
            await forget(store)
            line.rate = 12.5e6
            found = await asyncio.gather(*(store.get(k) for k in values))
            assert all(one is not None for one in found)
            tier = store.statistics().tiers["RedisTier"]
            assert (tier.late, tier.failed, tier.refused) == (0, 0, 0)


async def test_cancelled_puts_and_gets_are_never_torn(server: RedisProcess) -> None:
    rng = random.Random(7)
    async with opened(server.url, 8 * MIB) as store, opened(server.url) as other:
        for turn in range(100):
            key, value = f"k{turn % 5}", noise(MIB, turn)
            into = torch.zeros_like(value)
            putting = asyncio.ensure_future(store.put(key, value))
            getting = asyncio.ensure_future(other.get(f"k{turn % 3}", into=into))
            for _ in range(rng.randrange(40)):
                await asyncio.sleep(0)
            for task in (putting, getting):
                task.cancel()
                await asyncio.wait({task})
            value.fill_(0)  # what is stored of it now would be torn
            into.fill_(7)
            await asyncio.sleep(0)
            assert bool((into == 7).all())
        await store.flush()
        made = [noise(MIB, turn) for turn in range(100)]
        for key in [f"k{k}" for k in range(5)]:
            for found in (await store.get(key), await other.get(key)):
                assert found is None or any(torch.equal(found, one) for one in made)
        for one in (store, other):
            assert one.statistics().tiers["RedisTier"].corrupt == 0


def test_an_url_that_says_nothing_of_use_is_refused() -> None:
    with pytest.raises(asynckv.ConfigError, match="retain_s"):
        open_tier("redis://host?retain_s=-1")
