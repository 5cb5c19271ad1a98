"""What a Mooncake Store does wrong is a miss, in time, and never wrong bytes."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import pytest
import torch

from asynckv.abc import StoreTier, TierMemory, TierResult
from asynckv.stores.tiered import TieredStore
from asynckv.testing import until, until_blocked
from asynckv.testing.expectations import noise
from asynckv.testing.tier_checks import SomeValue
from harness.mooncake_servers import MooncakeServers, running_mooncake
from harness.redis_servers import free_port

DONE, MISSING = TierResult.DONE, TierResult.MISSING
FAILED, REFUSED = TierResult.FAILED, TierResult.REFUSED
MIB = 2**20
NBYTES = 300_000
LARGE_NBYTES = 24 * MIB
"""Of which a slot of the staging has room for one."""

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]


@pytest.fixture
async def tier(
    servers: MooncakeServers, opened_by: Callable[[str], StoreTier]
) -> AsyncIterator[StoreTier]:
    async with opened_by(servers.url) as tier:
        await tier.probe()
        yield tier


async def store(
    tier: StoreTier, *keys: str, nbytes: int = NBYTES
) -> Sequence[TierResult]:
    return await tier.store([SomeValue(key, nbytes, 1).to_store() for key in keys])


async def fetch(
    tier: StoreTier, *keys: str, nbytes: int = NBYTES
) -> Sequence[TierResult]:
    """Fetch values; what is found has to be right."""
    wanted = [SomeValue(key, nbytes) for key in keys]
    results = await tier.fetch(wanted)
    for one, result in zip(wanted, results, strict=True):
        assert result is not DONE or one.is_one_of(1)
    return results


async def until_stored(tier: StoreTier, key: str) -> None:
    """Wait until a master that was started anew knows of memory."""
    async with asyncio.timeout(30):
        while await store(tier, key) != [DONE]:
            await tier.probe()


async def client_pids() -> list[int]:
    """Return the processes that have Mooncake's client for a tier here."""
    return await asyncio.to_thread(_client_pids)


def _client_pids() -> list[int]:
    children = Path("/proc/self/task").glob("*/children")
    pids = [int(pid) for one in children for pid in one.read_text().split()]
    return [pid for pid in pids if b"mooncake_tier/client.py" in _command_of(pid)]


def _command_of(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


class Meddled(SomeValue):
    """A value before whose memory is given the server is frozen."""

    def __init__(self, key: str, nbytes: int, servers: MooncakeServers) -> None:
        super().__init__(key, nbytes)
        self._servers = servers

    async def place(self, header: bytes | memoryview) -> TierMemory | None:
        await self._servers.freeze()
        return await super().place(header)


async def test_a_master_that_was_killed_has_failed_and_one_that_is_back_is_empty(
    tier: StoreTier, servers: MooncakeServers
) -> None:
    assert await store(tier, "k1/a") == [DONE]
    await servers.kill_master()
    results = await asyncio.gather(
        *(fetch(tier, "k1/a"), store(tier, "k1/b")),
        *(tier.delete(["k1/a"]), tier.contains(["k1/a"])),
    )
    assert [list(one) for one in results] == [[FAILED]] * 4
    with pytest.raises(OSError):
        await tier.probe()
    await servers.start_master()
    await tier.probe()
    assert await fetch(tier, "k1/a") == [MISSING]
    await until_stored(tier, "k1/a")
    assert await fetch(tier, "k1/a") == [DONE]


async def test_a_master_that_is_killed_while_bytes_move_ends_the_calls(
    tier: StoreTier, servers: MooncakeServers
) -> None:
    assert await store(tier, "k1/a", nbytes=LARGE_NBYTES) == [DONE]
    keys = [f"k1/{number}" for number in range(6)]
    stored = [SomeValue(key, LARGE_NBYTES, 1).to_store() for key in keys]
    wanted = [SomeValue("k1/a", LARGE_NBYTES) for _ in keys]
    storing = asyncio.ensure_future(tier.store(stored))
    fetching = asyncio.ensure_future(tier.fetch(wanted))
    await until(lambda: any(one.moved_nbytes for one in wanted))
    await servers.kill_master()
    async with asyncio.timeout(30):
        assert set(await storing) <= {DONE, FAILED, REFUSED}
        for one, result in zip(wanted, await fetching, strict=True):
            assert result is FAILED or (result is DONE and one.is_one_of(1))
    assert FAILED in [*storing.result(), *fetching.result()]


async def test_calls_of_a_frozen_master_end_with_the_next_probe(
    tier: StoreTier, servers: MooncakeServers
) -> None:
    source, wanted = SomeValue("k1/b", NBYTES, 1), SomeValue("k1/a", NBYTES)
    assert await store(tier, "k1/a") == [DONE]
    await servers.freeze()
    calls = [
        asyncio.ensure_future(one)
        for one in (
            *(tier.fetch([wanted]), tier.store([source.to_store()])),
            *(tier.contains(["k1/a"]), tier.delete(["k1/a"])),
        )
    ]
    async with asyncio.timeout(5):
        with pytest.raises(OSError):
            await tier.probe()
        assert [list(await one) for one in calls] == [[FAILED]] * 4
    source.fill(bytes(NBYTES))
    servers.thaw()
    await tier.probe()
    assert not any(wanted.data)
    assert await fetch(tier, "k1/b") in ([MISSING], [DONE])  # a put is not undone
    await until_stored(tier, "k1/c")
    assert await fetch(tier, "k1/c") == [DONE]


async def test_what_has_come_before_the_master_froze_is_whole(
    tier: StoreTier, servers: MooncakeServers
) -> None:
    await store(tier, "k1/a", "k1/b")
    wanted = [Meddled(key, NBYTES, servers) for key in ("k1/a", "k1/b")]
    async with asyncio.timeout(5):
        assert await tier.fetch(wanted) == [DONE, DONE]
    assert all(one.is_one_of(1) for one in wanted)
    servers.thaw()


async def test_fetches_that_hang_in_all_slots_end_with_the_next_probe(
    tier: StoreTier, servers: MooncakeServers
) -> None:
    await store(tier, "k1/a")
    await servers.freeze_owner()
    calls = [asyncio.ensure_future(fetch(tier, "k1/a")) for _ in range(9)]
    await until_blocked(*calls)
    async with asyncio.timeout(20):
        await tier.probe()
        assert [await call for call in calls] == [[FAILED]] * 9
        assert await tier.contains(["k1/a"]) == [DONE]


async def test_closing_does_not_wait_for_a_frozen_master(
    tier: StoreTier, servers: MooncakeServers
) -> None:
    await servers.freeze()
    calls = [asyncio.ensure_future(one) for one in (fetch(tier, "a"), store(tier, "a"))]
    async with asyncio.timeout(2):
        await asyncio.sleep(0)
        await tier.aclose()
        assert [list(await one) for one in calls] == [[FAILED], [FAILED]]
    assert not await client_pids()


async def test_a_store_misses_while_the_master_is_frozen_and_goes_on_then(
    servers: MooncakeServers,
) -> None:
    async with TieredStore(4 * MIB, [servers.url]) as store:
        await store.put("a", noise(3 * MIB, 1))
        await store.flush()
        await store.put("b", noise(3 * MIB, 2))  # "a" has to make room
        await store.flush()
        await servers.freeze()
        async with asyncio.timeout(10):
            assert await store.get("a") is None
            assert await store.get("b") is not None
        await until(
            lambda: not store.statistics().tiers["mooncake"].is_loading, timeout_s=10
        )
        servers.thaw()
        await until(
            lambda: store.statistics().tiers["mooncake"].is_loading, timeout_s=30
        )
        found = await store.get("a")
        assert found is not None
        assert torch.equal(found, noise(3 * MIB, 1))


async def test_a_store_misses_while_there_is_no_master_and_goes_on_then(
    servers: MooncakeServers,
) -> None:
    async with TieredStore(4 * MIB, [servers.url]) as store:
        await servers.kill_master()
        async with asyncio.timeout(10):
            assert await store.get("a") is None
        await store.put("a", noise(MIB, 1))
        await until(
            lambda: not store.statistics().tiers["mooncake"].is_loading, timeout_s=10
        )
        await servers.start_master()
        async with asyncio.timeout(40):
            while not (await store.flush())["mooncake"].accepted:
                await store.put("a", noise(MIB, 1))
    async with TieredStore(4 * MIB, [servers.url]) as store:
        assert await store.get("a") is not None


async def test_what_a_dead_owner_had_is_not_found(
    tier: StoreTier, servers: MooncakeServers
) -> None:
    assert await store(tier, "k1/a") == [DONE]
    await servers.kill_owner()
    assert await fetch(tier, "k1/a") in ([FAILED], [MISSING])
    assert await store(tier, "k1/b") in ([FAILED], [REFUSED])


async def test_a_client_that_was_killed_is_started_anew_by_a_probe(
    tier: StoreTier,
) -> None:
    assert await store(tier, "k1/a") == [DONE]
    (pid,) = await client_pids()
    os.kill(pid, signal.SIGKILL)
    assert await fetch(tier, "k1/a") == [FAILED]
    assert await tier.delete(["k1/a"]) == [FAILED]
    await tier.probe()
    assert await fetch(tier, "k1/a") == [DONE]


async def test_a_client_that_hangs_is_replaced_by_a_probe(tier: StoreTier) -> None:
    assert await store(tier, "k1/a") == [DONE]
    (pid,) = await client_pids()
    os.kill(pid, signal.SIGSTOP)
    fetching = asyncio.ensure_future(fetch(tier, "k1/a"))
    with pytest.raises(OSError):
        await tier.probe()
    assert await fetching == [FAILED]
    await tier.probe()
    assert await fetch(tier, "k1/a") == [DONE]


@pytest.mark.parametrize("nbytes", [0, 100, NBYTES - 1, NBYTES + 1])
async def test_a_value_of_another_length_is_missing(
    nbytes: int, tier: StoreTier
) -> None:
    assert await store(tier, "k1/a", nbytes=nbytes) == [DONE]
    assert await fetch(tier, "k1/a") == [MISSING]


async def test_a_value_that_ends_before_its_header_is_missing(tier: StoreTier) -> None:
    begin = SomeValue("k1/a", 0, 1).to_store()
    begin.header = (2000).to_bytes(2, "little") + begin.header[2:]
    assert await tier.store([begin]) == [DONE]
    assert await fetch(tier, "k1/a") == [MISSING]


async def test_where_there_is_no_memory_values_are_refused(
    mooncake: None, opened_by: Callable[[str], StoreTier]
) -> None:
    async with running_mooncake("16MB") as servers, opened_by(servers.url) as tier:
        await tier.probe()
        assert await store(tier, "k1/a", nbytes=LARGE_NBYTES) == [REFUSED]
        assert await store(tier, "k1/a") == [DONE]


async def test_a_probe_of_nobody_ends_at_once(
    mooncake: None, opened_by: Callable[[str], StoreTier]
) -> None:
    async with opened_by(f"mooncake://127.0.0.1:{free_port()}") as tier:
        async with asyncio.timeout(5):
            with pytest.raises(OSError):
                await tier.probe()
        assert await fetch(tier, "k1/a") == [FAILED]
        assert await tier.contains([]) == []


async def test_a_closed_tier_is_not_there(tier: StoreTier) -> None:
    await tier.aclose()
    with pytest.raises(OSError):
        await tier.probe()
    assert await store(tier, "k1/a") == [FAILED]
