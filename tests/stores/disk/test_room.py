"""Values of all sizes share one bound, and the least wanted make room."""

from __future__ import annotations

import os
import random
from pathlib import Path

from asynckv.abc.tiers import TierResult
from asynckv.stores.disk import DiskTier
from asynckv.testing.tier_checks import SomeValue
from harness.disk_faults import OpenDisk

DONE = TierResult.DONE
MAX_BYTES = 8 * 2**20


async def store(tier: DiskTier, key: str, nbytes: int) -> TierResult:
    (result,) = await tier.store([SomeValue(key, nbytes, 1).to_store()])
    return result


async def has(tier: DiskTier, key: str, nbytes: int) -> bool:
    wanted = SomeValue(key, nbytes)
    (result,) = await tier.fetch([wanted])
    assert result is not DONE or wanted.is_one_of(1)
    return result is DONE


def on_disk(path: Path) -> int:
    return sum(os.stat(f"{path}/kv/{name}").st_size for name in os.listdir(path / "kv"))


async def test_the_bound_holds_whatever_is_stored(
    open_disk: OpenDisk, tmp_path: Path
) -> None:
    sizes = random.Random(1)
    async with open_disk(MAX_BYTES) as tier:
        for number in range(200):
            nbytes = sizes.choice((1, 5000, 70_000, 300_000, 1_500_000))
            assert await store(tier, f"k1/{number}", nbytes) is DONE
            assert await has(tier, f"k1/{number}", nbytes)
            assert on_disk(tmp_path) <= MAX_BYTES
        found = tier.statistics()
        assert found.evictions and found.file_bytes <= MAX_BYTES == found.max_bytes


async def test_another_size_gets_the_room_of_one_that_nobody_wants(
    open_disk: OpenDisk,
) -> None:
    async with open_disk(MAX_BYTES) as tier:
        for number in range(100):
            assert await store(tier, f"k1/small {number}", 70_000) is DONE
        for number in range(60):
            assert await store(tier, f"k1/large {number}", 500_000) is DONE
        kept = [await has(tier, f"k1/large {n}", 500_000) for n in range(60)]
        # Whatever the sizes were before, most of the room is theirs.
        assert sum(kept) * 500_000 > MAX_BYTES // 2
        assert kept[-1] and not kept[0]


async def test_a_value_that_is_wanted_stays(open_disk: OpenDisk) -> None:
    async with open_disk(MAX_BYTES) as tier:
        assert await store(tier, "k1/wanted", 300_000) is DONE
        for number in range(100):
            assert await store(tier, f"k1/{number}", 300_000) is DONE
            if number % 2:
                await tier.touch(["k1/wanted", "k1/never"])
        assert await has(tier, "k1/wanted", 300_000)
        assert not await has(tier, "k1/0", 300_000)


async def test_what_can_never_fit_is_refused_and_nothing_leaves(
    open_disk: OpenDisk,
) -> None:
    async with open_disk(MAX_BYTES) as tier:
        facts = await tier.probe()
        most = facts.max_value_nbytes
        assert most is not None and most > MAX_BYTES // 8
        assert await store(tier, "k1/a", 1000) is DONE
        assert await store(tier, "k1/b", most + 1) is TierResult.REFUSED
        assert await has(tier, "k1/a", 1000)
        assert await store(tier, "k1/b", most) is DONE
        assert await has(tier, "k1/b", most)


async def test_a_header_or_a_key_without_end_is_refused(open_disk: OpenDisk) -> None:
    async with open_disk() as tier:
        values = [
            SomeValue("k" * 5000, 1).to_store(),
            SomeValue("k1/a", 1).to_store(header_nbytes=5000),
        ]
        assert list(await tier.store(values)) == [TierResult.REFUSED] * 2
        assert not tier.statistics().keys


async def test_several_files_make_room_for_a_large_value(open_disk: OpenDisk) -> None:
    async with open_disk(MAX_BYTES) as tier:
        for number in range(110):
            assert await store(tier, f"k1/{number}", 70_000) is DONE
        assert await store(tier, "k1/large", 1_800_000) is DONE
        assert await has(tier, "k1/large", 1_800_000)
