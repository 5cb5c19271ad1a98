"""While a tier looks at what is there, it serves; and nothing old comes back."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

from asynckv.abc.tiers import TierPrefix, TierResult
from asynckv.stores.disk import DiskTier
from asynckv.testing.blocked import until, until_blocked
from asynckv.testing.tier_checks import SomeValue
from harness.disk_faults import FaultyCalls, OpenDisk

DONE, MISSING = TierResult.DONE, TierResult.MISSING
REFUSED = TierResult.REFUSED
NBYTES = 300_000
MAX_BYTES = 16 * 2**20


async def store(tier: DiskTier, key: str, seed: int = 1) -> TierResult:
    (result,) = await tier.store([SomeValue(key, NBYTES, seed).to_store()])
    return result


async def seed_of(tier: DiskTier, key: str) -> int | None:
    wanted = SomeValue(key, NBYTES)
    (result,) = await tier.fetch([wanted])
    if result is not DONE:
        return None
    return next(seed for seed in range(9) if wanted.is_one_of(seed))


@contextlib.asynccontextmanager
async def scanning(path: Path) -> AsyncIterator[tuple[DiskTier, FaultyCalls]]:
    """Have a tier whose first read does not return before it is let go."""
    calls = FaultyCalls()
    calls.hangs = 1
    try:
        async with DiskTier(path / "kv", MAX_BYTES, calls=calls) as tier:
            await tier.probe()
            await until(lambda: not calls.hangs)
            assert tier.statistics().is_scanning
            yield tier, calls
            calls.let_go()
    finally:
        calls.let_go()


async def fill(open_disk: OpenDisk, count: int) -> None:
    async with open_disk(MAX_BYTES) as tier:
        for number in range(count):
            assert await store(tier, f"k1/{number}") is DONE


async def test_what_was_not_found_yet_is_missing(
    open_disk: OpenDisk, tmp_path: Path
) -> None:
    await fill(open_disk, 3)
    async with scanning(tmp_path) as (tier, calls):
        assert list(await tier.contains(["k1/0"])) == [MISSING]
        assert await seed_of(tier, "k1/0") is None
        calls.let_go()
        await tier.scanned()
        assert [await seed_of(tier, f"k1/{number}") for number in range(3)] == [1] * 3


async def test_values_are_stored_where_there_is_certainly_room(
    open_disk: OpenDisk, tmp_path: Path
) -> None:
    await fill(open_disk, 3)
    async with scanning(tmp_path) as (tier, _):
        assert await store(tier, "k1/new", 2) is DONE
        assert await seed_of(tier, "k1/new") == 2
        assert list(await tier.contains(["k1/new"])) == [DONE]


async def test_nothing_has_to_leave_before_all_is_known(
    open_disk: OpenDisk, tmp_path: Path
) -> None:
    await fill(open_disk, 60)
    async with scanning(tmp_path) as (tier, calls):
        results = [await store(tier, f"k1/new {number}") for number in range(60)]
        assert results[-1] is TierResult.REFUSED
        assert not tier.statistics().evictions
        calls.let_go()
        await tier.scanned()
        assert await store(tier, "k1/newer") is DONE


async def test_an_old_value_does_not_come_back_over_a_new_one(
    open_disk: OpenDisk, tmp_path: Path
) -> None:
    await fill(open_disk, 3)
    async with scanning(tmp_path) as (tier, calls):
        assert await store(tier, "k1/0", 2) is DONE
        calls.let_go()
        await tier.scanned()
        assert await seed_of(tier, "k1/0") == 2
        assert list(await tier.delete(["k1/0"])) == [DONE]
    async with open_disk(MAX_BYTES) as tier:
        assert await seed_of(tier, "k1/0") is None
        assert await seed_of(tier, "k1/1") == 1


async def test_a_delete_is_certain_once_all_is_known(
    open_disk: OpenDisk, tmp_path: Path
) -> None:
    await fill(open_disk, 3)
    async with scanning(tmp_path) as (tier, calls):
        keys = ["k1/0", "k1/never"]
        assert list(await tier.delete(keys)) == [REFUSED, REFUSED]
        assert await store(tier, "k1/never", 3) is DONE
        calls.let_go()
        await tier.scanned()
        assert list(await tier.delete(["k1/0"])) == [DONE]
        assert await seed_of(tier, "k1/0") is None
        assert await seed_of(tier, "k1/never") == 3
    async with open_disk(MAX_BYTES) as tier:
        assert [await seed_of(tier, f"k1/{number}") for number in range(2)] == [None, 1]


async def test_a_clear_is_not_silent_until_all_is_known(
    open_disk: OpenDisk, tmp_path: Path
) -> None:
    await fill(open_disk, 3)
    async with scanning(tmp_path) as (tier, calls):
        prefix = TierPrefix("k1/")
        clearing = asyncio.ensure_future(tier.clear(prefix))
        await until(lambda: prefix.moved_nbytes > 1)
        calls.let_go()
        assert await clearing is DONE
        assert [await seed_of(tier, f"k1/{number}") for number in range(3)] == [
            None
        ] * 3


async def test_a_tier_may_be_closed_before_all_is_known(
    open_disk: OpenDisk, tmp_path: Path
) -> None:
    await fill(open_disk, 3)
    async with scanning(tmp_path) as (tier, calls):
        deleting = asyncio.ensure_future(tier.delete(["k1/0"]))
        await until_blocked(deleting)
        calls.let_go()
        await tier.aclose()
        assert list(await deleting) in ([TierResult.FAILED], [REFUSED])
        await tier.scanned()
    async with open_disk(MAX_BYTES) as tier:
        assert await seed_of(tier, "k1/1") == 1


async def test_what_is_void_is_not_found_again(open_disk: OpenDisk) -> None:
    values = [SomeValue(f"k1/{number}", 100).to_store() for number in range(2)]
    values[0].expires_at_s, values[1].expires_at_s = 1.0, 1e11
    for _ in range(2):
        async with open_disk() as tier:
            assert list(await tier.store(values)) == [DONE, DONE]
            found = list(await tier.contains(["k1/0", "k1/1"]))
            assert found == [MISSING, DONE]


async def test_it_is_scanned_in_many_chunks(open_disk: OpenDisk) -> None:
    async with open_disk() as tier:
        keys = [f"k1/{number}" for number in range(700)]
        for start in range(0, 700, 100):
            some = [SomeValue(key, 1).to_store() for key in keys[start : start + 100]]
            assert set(await tier.store(some)) == {DONE}
    async with open_disk() as tier:
        assert set(await tier.contains(keys)) == {DONE}
        assert tier.statistics().keys == 700


async def test_two_probes_open_one_tier(open_disk: OpenDisk, tmp_path: Path) -> None:
    async with DiskTier(tmp_path / "kv", MAX_BYTES) as tier:
        first, second = await asyncio.gather(tier.probe(), tier.probe())
        assert first == second and first.is_local
        assert await tier.probe() == first


async def test_a_probe_finds_that_the_directory_is_gone(
    open_disk: OpenDisk, tmp_path: Path
) -> None:
    async with open_disk() as tier:
        (tmp_path / "kv").rename(tmp_path / "moved")
        try:
            await tier.probe()
        except OSError:
            return
    raise AssertionError("it is still there")
