"""A Redis tier keeps what every tier keeps, however its server is reached."""

from __future__ import annotations

import math

import pytest
import redis.asyncio

from asynckv.abc.tiers import TierPrefix, TierResult
from asynckv.stores.redis import RedisTier
from asynckv.testing.tier_checks import TIER_CHECKS, SomeValue, TierCheck, open_tier
from harness.redis_servers import (
    RedisProcess,
)


@pytest.mark.both_loops
@pytest.mark.parametrize("check", TIER_CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("way", ["tcp", "unix"])
async def test_a_redis_tier_keeps_the_contract(
    check: TierCheck, way: str, server: RedisProcess
) -> None:
    url = server.url if way == "tcp" else server.unix_url
    await check(lambda: RedisTier(url))


@pytest.mark.parametrize("check", TIER_CHECKS, ids=lambda check: check.__name__)
async def test_a_redis_tier_keeps_the_contract_by_tls_and_with_a_password(
    check: TierCheck, tls_url: str
) -> None:
    await check(lambda: RedisTier(tls_url))


@pytest.mark.parametrize("total", [16 * 1024, 4 * 2**20, 5 * 2**20 + 16 * 1024])
@pytest.mark.parametrize("beside", [-1, 0, 1])
async def test_where_one_read_ends_and_the_next_begins_nothing_is_lost(
    total: int, beside: int, server: RedisProcess
) -> None:
    nbytes = total - 64 + beside
    async with open_tier(lambda: RedisTier(server.url)) as tier:
        stored, wanted = (SomeValue("k1/a", nbytes, 1) for _ in range(2))
        assert list(await tier.store([stored.to_store(64)])) == [TierResult.DONE]
        assert list(await tier.fetch([wanted])) == [TierResult.DONE]
        assert wanted.is_one_of(1)


@pytest.mark.parametrize("expires_at_s", [1e18, math.inf])
async def test_what_is_void_in_ever_so_long_is_kept(
    expires_at_s: float, server: RedisProcess
) -> None:
    async with open_tier(lambda: RedisTier(server.url)) as tier:
        value = SomeValue("k1/a", 64).to_store()
        value.expires_at_s = expires_at_s
        assert list(await tier.store([value])) == [TierResult.DONE]
        assert list(await tier.contains(["k1/a"])) == [TierResult.DONE]


async def test_a_prefix_of_2048_keys_is_asked_for_at_once(server: RedisProcess) -> None:
    keys = [f"k1/{number:0128x}" for number in range(2048)]
    async with open_tier(lambda: RedisTier(server.url)) as tier:
        await tier.store([SomeValue(key, 1).to_store() for key in keys[:300:3]])
        found = await tier.contains(keys)
        assert [one is TierResult.DONE for one in found] == [
            number < 300 and number % 3 == 0 for number in range(2048)
        ]


@pytest.mark.parametrize("prefix", ["k1/a/", "k*[a-z]?^\\/"])
async def test_many_keys_among_those_of_others_are_cleared(
    prefix: str, server: RedisProcess
) -> None:
    async with (
        open_tier(lambda: RedisTier(server.url)) as tier,
        redis.asyncio.Redis.from_url(server.url) as client,
    ):
        await client.mset({f"{prefix}{number}": "x" for number in range(3000)})
        await client.mset({f"k1/b/{number}": "x" for number in range(3000)})
        await client.sadd("kkaz/", "another type")
        cleared = TierPrefix(prefix)
        assert await tier.clear(cleared) is TierResult.DONE
        assert cleared.moved_nbytes > 5
        assert await client.dbsize() == 3001


def test_a_stall_that_is_no_time_is_refused() -> None:
    with pytest.raises(ValueError, match="stall_s is a number of seconds"):
        RedisTier("redis://host", stall_s=math.nan)
