"""Stores on every kind of tier: cancelled at random, and missed by a thousand."""

from __future__ import annotations

import contextlib
import itertools
import random
import shutil
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

import asynckv
from asynckv.abc import KVStoreBuffer
from asynckv.stores.disk import DiskTier
from asynckv.stores.tiered import TieredStore, open_tier
from harness.cancellations.at_random import KEYS, Versions, cancel_at_random
from harness.moto_server import MotoServer
from harness.redis_servers import CLI, PROGRAM, running_cluster, running_redis

MIB = 2**20
MEMORY = 10 * MIB
PATIENCE = "patience_s=20"
SERVED = {"tcp": "tcp://127.0.0.1:0", "unix": "unix://{folder}/s"}
HERE = ("memory", "disk", "file", "redis", *SERVED)
THOUSAND = 1000
NAMES = itertools.count()


@contextlib.asynccontextmanager
async def tier_url(kind: str, folder: Path) -> AsyncIterator[str]:
    """An empty place for a tier of that kind; of what is served: on the disk."""
    match kind:
        case "file":
            yield f"file://{folder}/kv"
        case "redis":
            async with running_redis(folder) as server:
                yield f"{server.url}?{PATIENCE}"
        case "redis+cluster":
            async with running_cluster(folder) as nodes:
                yield f"redis+cluster://127.0.0.1:{nodes[0].port}?{PATIENCE}"
        case _:
            yield f"disk://{folder}/kv?max=256MiB"


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


async def cancel_in(kind: str, folder: Path, url: str, cancellations: int) -> str:
    """Cancel puts and gets, then look at all values; again in the next store."""
    versions, seed = Versions(), random.randrange(2**32)
    async with opened(kind, folder, url) as (client, store):
        await fill(store, versions)
        cancelled = await cancel_at_random(client, versions, cancellations, seed)
        for key in KEYS:
            versions.check(key, await client.get(key))
        told = told_of(store)
    if kind != "memory":
        # What a far tier was not told, the next store does not know.
        check = versions.check if url.startswith("disk") else versions.check_any
        async with opened(kind, folder, url) as (client, _):
            for key in KEYS:
                check(key, await client.get(key))
    found = versions.found
    assert found[True] > found[False] / 10, found
    return f"{kind}: {dict(cancelled)} cancelled, {found[True]} found, {told}"


async def fill(store: asynckv.StoreBuffer, versions: Versions) -> None:
    """Put a value under each key, and let a tier have it."""
    for key in KEYS:
        await versions.put(store, key)
        if isinstance(store, TieredStore):
            await store.flush()


def told_of(store: asynckv.StoreBuffer) -> str:
    if not isinstance(store, TieredStore):
        return ""
    (tier,) = store.statistics().tiers.values()
    assert tier.hits
    assert not tier.corrupt
    return f"{tier.hits} of them from the tier, which was late {tier.late} times"


@pytest.mark.trust
@pytest.mark.both_loops
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", HERE)
async def test_what_is_cancelled_is_never_torn_and_never_written_to(
    kind: str,
    tmp_path: Path,
    scale: Any,
    figures: Callable[[str], None],
    obstore_has_its_threads: None,
) -> None:
    skip_without_redis(kind)
    async with tier_url(kind, tmp_path) as url:
        figures(await cancel_in(kind, tmp_path, url, scale.store_cancellations))


@pytest.mark.trust
@pytest.mark.both_loops
@pytest.mark.timeout(3600)
async def test_so_it_is_on_s3(
    s3: MotoServer, tmp_path: Path, scale: Any, figures: Callable[[str], None]
) -> None:
    url = s3.url(f"cancelled-{next(NAMES)}")
    figures(await cancel_in("s3", tmp_path, url, scale.store_cancellations))


@pytest.mark.chaos
@pytest.mark.both_loops
@pytest.mark.timeout(3600)
async def test_so_it_is_in_a_cluster(
    tmp_path: Path, scale: Any, figures: Callable[[str], None]
) -> None:
    kind = "redis+cluster"
    skip_without_redis(kind)
    async with tier_url(kind, tmp_path) as url:
        figures(await cancel_in(kind, tmp_path, url, scale.store_cancellations))


def skip_without_redis(kind: str) -> None:
    program = {"redis": PROGRAM, "redis+cluster": CLI}.get(kind)
    if program is not None and shutil.which(program) is None:
        pytest.skip(f"there is no {program} on the PATH: install Redis to run this")
