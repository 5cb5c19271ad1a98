"""Tenants of one served store: none of them ever sees what another one has."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
import torch

import asynckv
from asynckv import ConfigError, KVStoreBuffer, StoreBuffer, TieredStore
from asynckv.testing import Authority
from asynckv.testing.expectations import noise
from harness.tiers import DictTier

MIB = 2**20
MINE, THEIRS = noise(70_000, 1), noise(70_000, 2)
TENANTS = {"acme": "Engine-A", "umbrella": "engine-b"}


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("certificates"))


@contextlib.asynccontextmanager
async def served(authority: Authority, tier: DictTier) -> AsyncIterator[str]:
    tls = authority.issue()
    async with (
        TieredStore(MIB, [tier], drain_s=5) as store,
        asynckv.serve(
            "tls://127.0.0.1:0", store=store, tls=tls, tenants=TENANTS
        ) as server,
    ):
        yield server.url
        await store.flush()


@contextlib.asynccontextmanager
async def store_of(
    authority: Authority, url: str, name: str
) -> AsyncIterator[KVStoreBuffer]:
    async with asynckv.connect(url, tls=authority.issue(name)) as peer:
        yield peer.store


async def expect_nothing(store: KVStoreBuffer) -> None:
    """By no verb is there anything under ``a``."""
    assert await store.get("a") is None
    assert await store.get_many(["a"]) == (None,)
    assert await store.contains(["a"]) == (False,)
    assert await store.match_prefix(["a"]) == 0
    assert await store.stat("a") is None
    assert not await store.delete("a")
    async with store.pin(["a"]) as there:
        assert there == (False,)


@pytest.mark.parametrize("other", ["engine-b", "engine-c"])
async def test_nobody_but_a_tenant_finds_what_it_has(
    authority: Authority, other: str
) -> None:
    tier = DictTier()
    async with (
        served(authority, tier) as url,
        store_of(authority, url, "engine-a") as mine,
        store_of(authority, url, other) as theirs,
    ):
        await mine.put("a", MINE)
        await expect_nothing(theirs)
        await theirs.put("a", THEIRS)
        for _ in range(2):
            assert torch.equal(await found(mine), MINE)
            assert torch.equal(await found(theirs), THEIRS)
            await mine.put("filler", noise(MIB, 3))  # then only the tier has them
            await mine.delete("filler")
        assert await theirs.delete("a")
        await expect_nothing(theirs)
        await theirs.put("a", THEIRS)
        assert await theirs.clear() == 1
        await expect_nothing(theirs)
        assert torch.equal(await found(mine), MINE)


async def test_who_is_no_tenant_is_named_in_the_log(
    authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    async with served(authority, DictTier()) as url:
        async with store_of(authority, url, "engine-a") as mine:
            await expect_nothing(mine)
        assert "engine-a" not in caplog.text
        async with store_of(authority, url, "engine-c") as nobody_s:
            await expect_nothing(nobody_s)
        assert "certificate of engine-c" in caplog.text


async def test_a_tenant_s_name_may_be_any_of_a_certificate(
    authority: Authority,
) -> None:
    async with served(authority, DictTier()) as url:
        async with asynckv.connect(
            url, tls=authority.issue("host-7", "engine-a")
        ) as several:
            await several.store.put("a", MINE)
        async with store_of(authority, url, "engine-c") as nobody_s:
            await expect_nothing(nobody_s)
        async with store_of(authority, url, "engine-a") as mine:
            assert torch.equal(await found(mine), MINE)


async def found(store: KVStoreBuffer) -> torch.Tensor:
    value = await store.get("a")
    assert value is not None
    return value


async def test_what_is_fetched_for_one_at_once_with_another_is_its_own(
    authority: Authority,
) -> None:
    tier = DictTier()
    async with (
        served(authority, tier) as url,
        store_of(authority, url, "engine-a") as mine,
        store_of(authority, url, "engine-b") as theirs,
    ):
        await mine.put("a", MINE)
        await theirs.put("a", THEIRS)
        await mine.put("filler", noise(MIB, 3))
        values = await asyncio.gather(*[found(mine), found(theirs)] * 10)
        assert all(torch.equal(value, MINE) for value in values[::2])
        assert all(torch.equal(value, THEIRS) for value in values[1::2])


async def test_after_a_restart_each_has_its_own(authority: Authority) -> None:
    tier = DictTier()
    async with (
        served(authority, tier) as url,
        store_of(authority, url, "engine-a") as mine,
    ):
        await mine.put("a", MINE)
    async with (
        served(authority, DictTier(tier.values)) as url,
        store_of(authority, url, "engine-b") as theirs,
        store_of(authority, url, "engine-a") as mine,
    ):
        await expect_nothing(theirs)  # and nobody remembers that of the other one
        assert torch.equal(await found(mine), MINE)


@pytest.mark.parametrize(
    ("tenants", "why"),
    [
        ({"acme": "x", "umbrella": "X"}, "one certificate is that of two tenants"),
        ({"": "x"}, "no name of a tenant"),
        ({"a\0b": "x"}, "no name of a tenant"),
    ],
)
def test_tenants_that_cannot_be_told_apart_are_refused(
    authority: Authority, tenants: dict[str, str], why: str
) -> None:
    with pytest.raises(ConfigError, match=why):
        asynckv.serve(
            "tls://127.0.0.1:0",
            store=StoreBuffer(MIB),
            tls=authority.issue(),
            tenants=tenants,
        )


def test_tenants_without_certificates_are_refused() -> None:
    with pytest.raises(ConfigError, match="told apart by certificates"):
        asynckv.serve("tcp://127.0.0.1:0", store=StoreBuffer(MIB), tenants=TENANTS)
