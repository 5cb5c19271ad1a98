"""A store on a real disk: what memory has dropped, and what a restart has left."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import asynckv
from asynckv.stores.header import ValueName
from asynckv.stores.tiered import TieredStore, open_tier
from asynckv.testing.expectations import noise
from asynckv.testing.store_checks import CANCELLING_CHECKS, STORING_CHECKS, StoreCheck
from asynckv.testing.tier_checks import until_it_has

MIB = 2**20


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"disk://{tmp_path}/kv?max=256MiB"


@pytest.mark.parametrize(
    "check", [*STORING_CHECKS, *CANCELLING_CHECKS], ids=lambda check: check.__name__
)
async def test_on_a_disk_it_keeps_what_a_store_buffer_keeps(
    check: StoreCheck, url: str
) -> None:
    async with TieredStore(16 * MIB, [url]) as store:
        await check(store, store)


async def test_more_than_memory_holds_comes_back_from_the_disk(url: str) -> None:
    values = [noise(3 * MIB + number, number) for number in range(12)]
    async with TieredStore(16 * MIB, [url]) as store:
        for number, value in enumerate(values):
            await store.put(f"k{number}", value)
            await store.flush()
        assert store.statistics().evictions > 0
        for number, value in enumerate(values):
            found = await store.get(f"k{number}")
            assert found is not None
            assert torch.equal(found, value)


async def test_what_a_disk_has_accepted_is_found_by_the_next_process(url: str) -> None:
    async with TieredStore(16 * MIB, [url]) as store:
        await store.put("a", noise(MIB, 1))
        assert (await store.flush())["disk"].accepted == 1
    tier = open_tier(url)
    async with (
        TieredStore(16 * MIB, [tier]) as store,
        asynckv.serve("tcp://127.0.0.1:0", store=store) as server,
        asynckv.connect(server.url) as peer,
    ):
        await until_it_has(tier, ValueName("a").tier_key)
        found = await peer.store.get("a")
        assert found is not None
        assert torch.equal(found, noise(MIB, 1))


async def test_a_disk_that_another_store_has_is_refused(url: str) -> None:
    async with TieredStore(16 * MIB, [url]):
        with pytest.raises(asynckv.ConfigError):
            async with TieredStore(16 * MIB, [url]):
                pass


def test_an_url_that_says_nothing_of_use_is_refused() -> None:
    with pytest.raises(asynckv.ConfigError, match="max"):
        open_tier("disk:///var/kv")
