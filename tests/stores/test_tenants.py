"""One key of two tenants, and of nobody: by no verb, in no tier, is it another's."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
import torch

import asynckv
from asynckv.abc import KVStoreBuffer
from asynckv.buffers.store import StoreBuffer
from asynckv.stores.tiered import TieredStore
from asynckv.testing.certificates import Authority
from asynckv.testing.expectations import noise
from harness.moto_server import MotoServer
from harness.redis_servers import running_redis

MIB = 2**20
PATIENT_S = 20
TIERS = ("memory", "disk", "file", "redis", "s3")
TENANTS = {"acme": "engine-a", "umbrella": "engine-b"}
MINE, THEIRS, NOBODY_S = (noise(20_000, seed) for seed in (1, 2, 3))

_numbers = itertools.count()


@pytest.fixture(scope="module", autouse=True)
def authority(
    tmp_path_factory: pytest.TempPathFactory, moto: MotoServer | None
) -> Authority:
    """And the server, which outlives a test, is there before the first."""
    return Authority(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(params=TIERS)
def urls(request: pytest.FixtureRequest, tmp_path: Path) -> list[str]:
    """Of the tiers of a store, with nothing in them."""
    kind = request.param
    if kind == "s3":
        server: MotoServer = request.getfixturevalue("s3")
        return [server.url(f"tenants-{next(_numbers)}", patience=str(PATIENT_S))]
    if kind == "redis":
        request.getfixturevalue("redis_program")
        return ["redis+unix:"]
    places = {"disk": f"disk://{tmp_path}/kv?max=16MiB", "file": f"file://{tmp_path}/o"}
    return [places[kind]] if kind in places else []


@pytest.fixture
async def tiers(urls: list[str], tmp_path: Path) -> AsyncIterator[list[str]]:
    """The same, with the server where that is a process of the test's own."""
    if urls != ["redis+unix:"]:
        yield urls
        return
    async with running_redis(tmp_path) as server:
        yield [f"{server.unix_url}?patience_s={PATIENT_S}"]


@dataclasses.dataclass
class Served:
    """A store that is served, as its tenants have it, and peers that are of none."""

    store: StoreBuffer
    mine: KVStoreBuffer
    theirs: KVStoreBuffer
    nobody_s: KVStoreBuffer

    async def evict(self) -> None:
        """Let memory have nothing, where there is a tier that has."""
        if isinstance(self.store, TieredStore):
            await self.store.flush()
            await self.store.put("filler", noise(MIB, 4))
            await self.store.delete("filler")
            await self.store.flush()


@contextlib.asynccontextmanager
async def served(authority: Authority, tiers: list[str]) -> AsyncIterator[Served]:
    store = TieredStore(MIB, tiers, drain_s=PATIENT_S) if tiers else StoreBuffer(MIB)
    certified = authority.issue()
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(store)
        server = await stack.enter_async_context(
            asynckv.serve(
                "tls://127.0.0.1:0", store=store, tls=certified, tenants=TENANTS
            )
        )
        peers = [
            await stack.enter_async_context(
                asynckv.connect(server.url, tls=authority.issue(name))
            )
            for name in ("engine-a", "engine-b", "engine-c")
        ]
        yield Served(store, *(peer.store for peer in peers))


async def expect(store: KVStoreBuffer, value: torch.Tensor | None) -> None:
    """By every verb that looks, ``a`` is this, or there is none."""
    is_there = value is not None
    assert await store.contains(["a"]) == (is_there,)
    assert await store.match_prefix(["a"]) == int(is_there)
    told = await store.stat("a")
    assert (told is not None) is is_there
    for is_prefix in (True, False):
        async with store.pin(["a"], prefix=is_prefix) as there:
            assert there == (is_there,)
    (one_of_many,) = await store.get_many(["a"])
    for found in (one_of_many, await store.get("a")):
        assert (found is not None) is is_there
        assert found is None or value is None or torch.equal(found, value)


async def put(store: KVStoreBuffer, value: torch.Tensor) -> torch.Tensor | None:
    await store.put("a", value)
    return value


async def put_many(store: KVStoreBuffer, value: torch.Tensor) -> torch.Tensor | None:
    await store.put_many([("a", value), ("b", value)])
    return value


async def delete(store: KVStoreBuffer, value: torch.Tensor) -> torch.Tensor | None:
    assert not await store.delete("a")
    await store.put("a", value)
    assert await store.delete("a")
    return None


async def clear(store: KVStoreBuffer, value: torch.Tensor) -> torch.Tensor | None:
    assert await store.clear() == 0
    await store.put("a", value)
    assert await store.clear() == 1
    return None


Change = Callable[[KVStoreBuffer, torch.Tensor], Awaitable[torch.Tensor | None]]


@pytest.mark.parametrize("change", [put, put_many, delete, clear])
async def test_what_others_do_with_a_key_is_nothing_to_whose_it_is(
    change: Change, authority: Authority, tiers: list[str]
) -> None:
    async with served(authority, tiers) as one:
        await one.mine.put("a", MINE)
        for other, value in ((one.theirs, THEIRS), (one.nobody_s, NOBODY_S)):
            await expect(other, None)
            left = await change(other, value)
            for _ in ("in memory", "in a tier alone"):
                await expect(one.mine, MINE)
                await expect(other, left)
                await one.evict()


async def test_what_is_fetched_for_all_at_once_is_each_one_s_own(
    authority: Authority, tiers: list[str]
) -> None:
    async with served(authority, tiers) as one:
        await one.mine.put("a", MINE)
        await one.theirs.put("a", THEIRS)
        await one.evict()
        all_of_them = [(one.mine, MINE), (one.theirs, THEIRS), (one.nobody_s, None)]
        await asyncio.gather(*itertools.starmap(expect, all_of_them * 5))


async def test_after_a_restart_what_one_has_not_another_still_finds(
    authority: Authority, tiers: list[str]
) -> None:
    async with served(authority, tiers) as one:
        await one.mine.put("a", MINE)
        await one.evict()
    async with served(authority, tiers) as one:
        for other in (one.theirs, one.nobody_s):
            await expect(other, None)  # which is remembered of the other alone
        await expect(one.mine, MINE if tiers else None)
        await one.theirs.put("a", THEIRS)
        await one.evict()
        await expect(one.theirs, THEIRS)
        await expect(one.nobody_s, None)
