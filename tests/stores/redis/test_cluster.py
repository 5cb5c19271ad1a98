"""A tier in a cluster, of which nodes are killed, freeze, or are elsewhere."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest
import redis.asyncio

from asynckv.abc import StoreTier
from asynckv.abc.tiers import TierResult
from asynckv.errors import ConfigError
from asynckv.stores.redis import RedisTier
from asynckv.testing.tier_checks import TIER_CHECKS, SomeValue
from harness.redis_servers import (
    CLI,
    RedisProcess,
    free_port,
    running_cluster,
    running_redis,
)

DONE, MISSING, REFUSED = TierResult.DONE, TierResult.MISSING, TierResult.REFUSED
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


@pytest.mark.chaos
@pytest.mark.timeout(120)
async def test_while_a_master_is_frozen_the_others_are_asked_without_it(
    tmp_path: Path, redis_program: None, caplog: pytest.LogCaptureFixture
) -> None:
    if shutil.which(CLI) is None:
        pytest.skip(f"there is no {CLI} on the PATH: install Redis to run this")
    async with running_cluster(tmp_path) as nodes:
        for node in nodes:  # nobody takes the place of the frozen one
            async with redis.asyncio.Redis.from_url(node.url) as client:
                await client.config_set("cluster-node-timeout", 100_000)
        url = nodes[0].url.replace("redis://", "redis+cluster://")
        async with RedisTier(url, stall_s=20) as tier:
            await tier.probe()
            stored = [SomeValue(key, NBYTES, 1).to_store() for key in KEYS]
            assert set(await tier.store(stored)) == {DONE}
            nodes[1].freeze()
            await tier.probe()
            assert f"{nodes[1].port} does not answer" in caplog.text
            assert set(await found_in(tier)) == {DONE, REFUSED}
            assert set(await tier.contains(KEYS)) == {DONE, REFUSED}
            nodes[1].thaw()
            while REFUSED in (results := await found_in(tier)):
                await tier.probe()
            assert set(results) == {DONE}


@pytest.fixture
async def lone_node(tmp_path: Path, redis_program: None) -> AsyncIterator[RedisProcess]:
    """A cluster of one, which says that it is where nobody is."""
    options = (
        *("--cluster-enabled", "yes", "--cluster-port", str(free_port())),
        *("--cluster-announce-ip", "127.0.0.1"),
        *("--cluster-announce-port", str(free_port())),
    )
    async with running_redis(tmp_path, *options) as node:
        async with redis.asyncio.Redis.from_url(node.url) as client:
            await client.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
        yield node


async def test_who_the_url_names_is_asked_when_no_other_node_is_there_any_more(
    lone_node: RedisProcess,
) -> None:
    url = lone_node.url.replace("redis://", "redis+cluster://")
    async with RedisTier(url) as tier:
        for _ in range(2):
            await tier.probe()
            assert set(await tier.contains(KEYS)) == {REFUSED}


async def test_a_cluster_that_refuses_us_says_so(lone_node: RedisProcess) -> None:
    async with redis.asyncio.Redis.from_url(lone_node.url) as client:
        await client.config_set("requirepass", "s3cret")
    for place in ("", ":wrong@"):
        url = f"redis+cluster://{place}127.0.0.1:{lone_node.port}"
        async with RedisTier(url) as tier:
            with pytest.raises(ConfigError, match="refuses us"):
                await tier.probe()


async def test_a_server_that_is_no_cluster_says_so(
    tmp_path: Path, redis_program: None
) -> None:
    async with running_redis(tmp_path) as server:
        async with RedisTier(server.url.replace("://", "+cluster://")) as tier:
            with pytest.raises(OSError, match="cluster support disabled"):
                await tier.probe()


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
    results = [REFUSED]
    while not set(results) <= {DONE, MISSING} and time.monotonic() < ends:
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
