"""A tier in a cluster of three masters and three replicas, one of which is killed."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import redis.asyncio

from asynckv.abc import StoreTier
from asynckv.abc.tiers import TierResult
from asynckv.stores.redis import RedisTier
from asynckv.testing.tier_checks import TIER_CHECKS, SomeValue
from harness.redis_servers import CLI, RedisProcess, running_cluster

DONE, MISSING = TierResult.DONE, TierResult.MISSING
KEYS = [f"k1/{number}" for number in range(60)]
NBYTES = 100_000


@pytest.mark.chaos
@pytest.mark.timeout(120)
async def test_a_cluster_keeps_the_contract_and_a_lost_master_is_replaced(
    tmp_path: Path, redis_program: None
) -> None:
    if shutil.which(CLI) is None:
        pytest.skip(f"there is no {CLI} on the PATH: install Redis to run this")
    async with running_cluster(tmp_path) as nodes:
        url = nodes[0].url.replace("redis://", "redis+cluster://")

        for check in TIER_CHECKS:
            await forget_all(nodes)
            await check(lambda: RedisTier(url))
        async with RedisTier(url) as tier:
            await tier.probe()
            stored = [SomeValue(key, NBYTES, 1).to_store() for key in KEYS]
            assert set(await tier.store(stored)) == {DONE}
            assert set(await found_in(tier)) == {DONE}
            # The one that the URL names: the others are known by now.
            await nodes[0].kill()
            await until_replaced(tier)


async def forget_all(nodes: Sequence[RedisProcess]) -> None:
    for node in nodes:
        async with redis.asyncio.Redis.from_url(node.url) as client:
            with contextlib.suppress(redis.ReadOnlyError):
                await client.flushall()


async def found_in(tier: StoreTier) -> list[TierResult]:
    """Fetch all values; those that are found have to be right."""
    wanted = [SomeValue(key, NBYTES) for key in KEYS]
    results = list(await tier.fetch(wanted))
    for one, result in zip(wanted, results, strict=True):
        assert result is not DONE or one.is_one_of(1)
    return results


async def until_replaced(tier: StoreTier) -> None:
    """Ask until every key is where it was, or is known to be lost; and store again."""
    ends = time.monotonic() + 40
    results = [TierResult.FAILED]
    while TierResult.FAILED in results and time.monotonic() < ends:
        began = time.monotonic()
        results = await found_in(tier)
        assert time.monotonic() - began < 5
        # What was somebody else's is answered all the while.
        assert results.count(DONE) >= len(KEYS) // 3
    assert set(results) <= {DONE, MISSING}
    stored = [SomeValue(key, NBYTES, 1).to_store() for key in KEYS]
    assert set(await tier.store(stored)) == {DONE}
    assert set(await found_in(tier)) == {DONE}
    assert set(await tier.contains(KEYS)) == {DONE}
    assert set(await tier.delete(KEYS)) == {DONE}
