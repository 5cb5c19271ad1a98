"""Stores on every kind of tier: cancelled at random, and missed by a thousand."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import shutil
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import asynckv
from asynckv.abc import KVStoreBuffer
from asynckv.stores.disk import DiskTier
from asynckv.stores.health import TierStatistics
from asynckv.stores.tiered import TieredStore, open_tier
from asynckv.testing.expectations import noise
from harness.cancellations.at_random import KEYS, Versions, cancel_at_random
from harness.moto_server import MotoServer
from harness.redis_servers import CLI, PROGRAM, running_cluster, running_redis

MEMORY = 9 * 2**20
PATIENCE = "patience_s=20"
SERVED = {"tcp": "tcp://127.0.0.1:0", "unix": "unix://{folder}/s"}
TIERS = ("disk", "file", "redis", "s3", *SERVED)
CLUSTER = "redis+cluster"
PROGRAMS = {"redis": PROGRAM, CLUSTER: CLI}
THOUSAND = 1000
NAMES = itertools.count()

pytestmark = [pytest.mark.both_loops(only_at="chaos"), pytest.mark.timeout(3600)]


@pytest.fixture
async def url(
    kind: str, tmp_path: Path, moto: MotoServer | None, request: pytest.FixtureRequest
) -> AsyncIterator[str]:
    """An empty place for a tier of that kind; of what is served: on the disk."""
    program = PROGRAMS.get(kind, sys.executable)
    if shutil.which(program) is None:
        pytest.skip(f"there is no {program} on the PATH: install Redis to run this")
    match kind:
        case "file":
            yield f"file://{tmp_path}/kv"
        case "s3":
            server: MotoServer = request.getfixturevalue("s3")
            yield server.url(f"trust-{next(NAMES)}")
        case "redis":
            async with running_redis(tmp_path) as one:
                yield f"{one.url}?{PATIENCE}"
        case "redis+cluster":
            async with running_cluster(tmp_path) as nodes:
                yield f"{CLUSTER}://127.0.0.1:{nodes[0].port}?{PATIENCE}"
        case _:
            yield f"disk://{tmp_path}/kv?max=256MiB"


@contextlib.asynccontextmanager
async def opened(
    kind: str, folder: Path, url: str
) -> AsyncIterator[tuple[KVStoreBuffer, asynckv.StoreBuffer]]:
    """A store as its client sees it, and the one that has the values."""
    if kind == "memory":
        async with asynckv.StoreBuffer(MEMORY) as buffer:
            yield buffer, buffer
        return
    tier = open_tier(url)
    async with TieredStore(MEMORY, [tier]) as store:
        if isinstance(tier, DiskTier):
            await tier.scanned()
        if kind not in SERVED:
            yield store, store
            return
        at = SERVED[kind].format(folder=folder)
        async with (
            asynckv.serve(at, store=store) as server,
            asynckv.connect(server.url) as peer,
        ):
            yield peer.store, store


async def fill(store: asynckv.StoreBuffer, versions: Versions) -> None:
    """Put a value under each key, and let a tier have it."""
    for key in KEYS:
        await versions.put(store, key)
        if isinstance(store, TieredStore):
            await store.flush()


def tier_of(store: asynckv.StoreBuffer) -> TierStatistics | None:
    if not isinstance(store, TieredStore):
        return None
    (tier,) = store.statistics().tiers.values()
    return tier


def marked(*kinds: str) -> list[Any]:
    return [
        *(pytest.param(kind, marks=pytest.mark.trust) for kind in kinds),
        pytest.param(CLUSTER, marks=pytest.mark.chaos),  # it takes long to begin
    ]


@pytest.mark.parametrize("kind", marked("memory", *TIERS))
async def test_what_is_cancelled_is_never_torn_and_never_written_to(
    kind: str, tmp_path: Path, url: str, scale: Any, figures: Callable[[str], None]
) -> None:
    versions, seed = Versions(), random.randrange(2**32)
    async with opened(kind, tmp_path, url) as (client, store):
        await fill(store, versions)
        count = scale.store_cancellations
        cancelled = await cancel_at_random(client, versions, count, seed)
        for key in KEYS:
            versions.check(key, await client.get(key))
        told = tier_of(store)
    if kind != "memory":
        # What a far tier was not told, the next store does not know.
        check = versions.check if url.startswith("disk") else versions.check_any
        async with opened(kind, tmp_path, url) as (client, _):
            for key in KEYS:
                check(key, await client.get(key))
    assert told is None or (told.hits and not told.corrupt)
    late = "" if told is None else f", {told.hits} of a tier, late {told.late} times"
    figures(f"{dict(cancelled)} cancelled; {versions.found[True]} found{late}")


@pytest.mark.parametrize("kind", marked(*TIERS))
async def test_a_thousand_who_miss_one_key_are_one_fetch(
    kind: str, tmp_path: Path, url: str
) -> None:
    value = noise(100_000, 1)
    async with opened(kind, tmp_path, url) as (client, store):
        await client.put("a", value)
    async with opened(kind, tmp_path, url) as (client, store):
        found = await asyncio.gather(*(client.get("a") for _ in range(THOUSAND)))
        assert all(one is not None and torch.equal(one, value) for one in found)
        told = tier_of(store)
        assert told is not None
        assert (told.hits, told.misses) == (1, 0)
