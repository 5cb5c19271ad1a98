"""The example tier keeps what every tier keeps, opened by the entry point."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from asynckv.abc import StoreTier
from asynckv.errors import ConfigError
from asynckv.stores.tiered import TieredStore, open_tier
from asynckv.testing import TIER_CHECKS
from asynckv.testing.expectations import noise
from asynckv.testing.store_checks import CANCELLING_CHECKS, STORING_CHECKS, StoreCheck
from asynckv.testing.tier_checks import TierCheck
from harness.mooncake_servers import MooncakeServers
from harness.redis_servers import free_port

MIB = 2**20

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]


@pytest.mark.both_loops
@pytest.mark.parametrize("check", TIER_CHECKS, ids=lambda check: check.__name__)
async def test_a_mooncake_tier_keeps_the_contract(
    check: TierCheck, servers: MooncakeServers, opened_by: Callable[[str], StoreTier]
) -> None:
    await check(lambda: opened_by(servers.url))


@pytest.mark.parametrize(
    "check", [*STORING_CHECKS, *CANCELLING_CHECKS], ids=lambda check: check.__name__
)
async def test_a_store_on_it_keeps_what_a_store_buffer_keeps(
    check: StoreCheck, servers: MooncakeServers
) -> None:
    async with TieredStore(16 * MIB, [servers.url]) as store:
        await check(store, store)


async def test_two_stores_on_one_mooncake_find_what_either_has_put(
    servers: MooncakeServers,
) -> None:
    async with (
        TieredStore(32 * MIB, [servers.url]) as one,
        TieredStore(32 * MIB, [servers.url]) as other,
    ):
        for number, (writer, reader) in enumerate([(one, other), (other, one)]):
            await writer.put(f"k{number}", noise(9 * MIB, number))
            assert (await writer.flush())["mooncake"].accepted == 1
            assert await reader.match_prefix([f"k{number}", "k9"]) == 1
            found = await reader.get(f"k{number}")
            assert found is not None
            assert torch.equal(found, noise(9 * MIB, number))


async def test_a_value_that_was_deleted_in_one_store_is_gone_for_the_next(
    servers: MooncakeServers,
) -> None:
    async with TieredStore(MIB, [servers.url]) as store:
        await store.put("a", noise(5000, 1))
        await store.flush()
        assert await store.delete("a")
        await store.flush()
    async with TieredStore(MIB, [servers.url]) as store:
        assert await store.get("a") is None


async def test_a_value_that_fits_in_no_slot_of_the_staging_stays_in_memory(
    servers: MooncakeServers,
) -> None:
    async with TieredStore(16 * MIB, [f"{servers.url}?staging_mib=4"]) as store:
        await store.put("a", noise(MIB, 1))
        await store.put("b", noise(100, 2))
        flushed = (await store.flush())["mooncake"]
        assert (flushed.accepted, flushed.dropped) == (1, 1)
        assert await store.get("a") is not None


def test_the_package_offers_the_scheme(installed: None) -> None:
    offered = importlib.metadata.entry_points(group="asynckv.tiers")
    assert "mooncake" in offered.names


@pytest.mark.parametrize(
    "url",
    [
        "mooncake://",
        "mooncake://127.0.0.1:port",
        "mooncake://user@127.0.0.1:50051",
        "mooncake://127.0.0.1/path",
        "mooncake://127.0.0.1?staging_mib=0",
        "mooncake://127.0.0.1?staging_mib=much",
        "mooncake://127.0.0.1?patience=0",
        "mooncake://127.0.0.1?patience=nan",
        "mooncake://127.0.0.1?unknown=1",
    ],
)
def test_an_url_that_says_something_wrong_is_refused(url: str, installed: None) -> None:
    with pytest.raises(ConfigError, match="Mooncake") as caught:
        open_tier(url)
    assert "mooncake://master:50051" in str(caught.value.hint)


async def test_who_has_no_wheel_is_told_what_to_install(
    opened_by: Callable[[str], StoreTier],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "mooncake.py").touch()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    async with opened_by(f"mooncake://127.0.0.1:{free_port()}") as tier:
        with pytest.raises(ConfigError) as caught:
            await tier.probe()
    assert "pip install mooncake-transfer-engine" in str(caught.value.hint)
