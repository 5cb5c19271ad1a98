"""What a disk does wrong is a miss and one line in the log, and never wrong bytes."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from asynckv.abc.tiers import TierPrefix, TierResult
from asynckv.errors import ConfigError
from asynckv.stores.disk import DiskTier, room
from asynckv.stores.disk.calls import PAGE_NBYTES
from asynckv.testing.blocked import until
from asynckv.testing.tier_checks import SomeValue
from harness.disk_faults import FaultyCalls, OpenDisk

DONE, MISSING = TierResult.DONE, TierResult.MISSING
FAILED, REFUSED = TierResult.FAILED, TierResult.REFUSED
NBYTES = 300_000
"""More than is read at once, in a slot of 81 pages."""


@pytest.fixture
def calls() -> Iterator[FaultyCalls]:
    calls = FaultyCalls()
    yield calls
    calls.let_go()


async def store(tier: DiskTier, key: str, nbytes: int = NBYTES) -> TierResult:
    (result,) = await tier.store([SomeValue(key, nbytes, 1).to_store()])
    return result


async def fetch(tier: DiskTier, key: str, nbytes: int = NBYTES) -> TierResult:
    """Fetch a value; what is found has to be right."""
    wanted = SomeValue(key, nbytes)
    (result,) = await tier.fetch([wanted])
    assert result is not DONE or wanted.is_one_of(1)
    return result


def files_in(path: Path) -> list[Path]:
    return sorted((path / "kv").glob("*.slots"))


def lines_in(caplog: pytest.LogCaptureFixture) -> int:
    return sum(record.name.startswith("asynckv.stores") for record in caplog.records)


async def test_two_tiers_on_one_path_are_one_too_many(
    open_disk: OpenDisk, tmp_path: Path
) -> None:
    async with open_disk() as tier:
        assert await store(tier, "k1/a") is DONE
        second = DiskTier(tmp_path / "kv", 16 * 2**20)
        with pytest.raises(ConfigError, match="in use"):
            await second.probe()
        await second.aclose()
        assert await fetch(tier, "k1/a") is DONE
    async with open_disk() as tier:
        assert await fetch(tier, "k1/a") is DONE


async def test_a_path_that_can_be_no_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    tier = DiskTier(tmp_path / "file" / "kv", 16 * 2**20)
    for _ in range(2):
        with pytest.raises(ConfigError, match="no directory"):
            await tier.probe()
    await tier.aclose()


def test_a_path_is_meant_as_from_where_the_tier_was_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert DiskTier("kv", 16 * 2**20).path == tmp_path / "kv"


async def test_files_of_others_are_left_alone(
    open_disk: OpenDisk, tmp_path: Path
) -> None:
    (tmp_path / "kv").mkdir()
    names = ["notes.slots", "000001-0.slots", "1-3.slots", "000001-3.slots.bak"]
    for name in names:
        (tmp_path / "kv" / name).write_bytes(b"mine")
    async with open_disk(2**20) as tier:
        for number in range(9):
            assert await store(tier, f"k1/{number}", 200_000) is DONE
    assert all((tmp_path / "kv" / name).read_bytes() == b"mine" for name in names)


@pytest.mark.parametrize("error", [errno.EIO, errno.EROFS])
async def test_what_cannot_be_read_has_failed_and_stays(
    error: int,
    calls: FaultyCalls,
    open_disk: OpenDisk,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with open_disk(calls=calls) as tier:
        for nbytes in (NBYTES, 100):
            assert await store(tier, f"k1/{nbytes}", nbytes) is DONE
        calls.read_error = error
        for nbytes in (NBYTES, 100, NBYTES):
            assert await fetch(tier, f"k1/{nbytes}", nbytes) is FAILED
        assert lines_in(caplog) == 1
        calls.read_error = 0
        for nbytes in (NBYTES, 100):
            assert await fetch(tier, f"k1/{nbytes}", nbytes) is DONE


@pytest.mark.parametrize(
    ("error", "result"),
    [(errno.EIO, FAILED), (errno.ENOSPC, REFUSED), (errno.EDQUOT, REFUSED)],
)
async def test_what_cannot_be_written_is_not_there(
    error: int,
    result: TierResult,
    calls: FaultyCalls,
    open_disk: OpenDisk,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with open_disk(calls=calls) as tier:
        assert await store(tier, "k1/before") is DONE
        calls.write_error = error
        assert [await store(tier, "k1/a") for _ in range(3)] == [result] * 3
        assert lines_in(caplog) == 2  # neither written nor overwritten
        assert tier.statistics().lost_slots == 3
        calls.write_error = 0
        assert await fetch(tier, "k1/a") is MISSING
        assert await store(tier, "k1/a") is DONE
        assert await fetch(tier, "k1/before") is DONE


@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC])
async def test_a_delete_that_cannot_be_written_has_failed_until_it_can(
    error: int, calls: FaultyCalls, open_disk: OpenDisk
) -> None:
    async with open_disk(calls=calls) as tier:
        assert await store(tier, "k1/a") is DONE
        calls.write_error = error
        for _ in range(2):
            assert list(await tier.delete(["k1/a", "k1/b"])) == [FAILED, DONE]
            assert await fetch(tier, "k1/a") is MISSING
        calls.write_error = 0
        assert list(await tier.delete(["k1/a"])) == [DONE]
        assert not tier.statistics().lost_slots
    async with open_disk(calls=calls) as tier:
        assert await fetch(tier, "k1/a") is MISSING


async def test_a_clear_says_that_it_cannot_read_or_write_and_then_does(
    calls: FaultyCalls, open_disk: OpenDisk
) -> None:
    async with open_disk(calls=calls) as tier:
        for key in ("k1/a/1", "k1/b/1"):
            assert await store(tier, key) is DONE
        calls.read_error = errno.EIO
        assert await tier.clear(TierPrefix("k1/a/")) is REFUSED
        calls.read_error, calls.write_error = 0, errno.EIO
        assert await tier.clear(TierPrefix("k1/a/")) is REFUSED
        assert await tier.contains(["k1/a/1", "k1/b/1"]) == [MISSING, DONE]
        calls.write_error = 0
        assert await tier.clear(TierPrefix("k1/a/")) is DONE
    async with open_disk() as tier:
        assert await tier.contains(["k1/a/1", "k1/b/1"]) == [MISSING, DONE]


async def test_values_that_are_read_while_they_are_cleared_are_read_whole(
    calls: FaultyCalls, open_disk: OpenDisk
) -> None:
    async with open_disk(calls=calls) as tier:
        assert await store(tier, "k1/a/1") is DONE
        calls.hangs = 1
        reading = asyncio.create_task(fetch(tier, "k1/a/1"))
        await until(lambda: calls.hangs == 0)
        assert await tier.clear(TierPrefix("k1/a/")) is DONE
        assert await store(tier, "k1/b/1") is DONE
        calls.let_go()
        assert await reading in (DONE, MISSING)
        assert await fetch(tier, "k1/a/1") is MISSING


async def test_what_a_broken_disk_has_lost_is_tried_again_by_a_probe(
    calls: FaultyCalls, open_disk: OpenDisk
) -> None:
    async with open_disk(calls=calls) as tier:
        calls.write_error = errno.EIO
        for number in range(5):
            assert await store(tier, f"k1/{number}") is FAILED
        free = tier.statistics().free_slots
        await tier.probe()
        await until(lambda: tier.statistics().lost_slots == 5)
        calls.write_error = 0
        await tier.probe()
        await until(lambda: tier.statistics().free_slots == free + 5)
        assert await store(tier, "k1/0") is DONE


async def test_an_old_value_that_stays_on_the_disk_is_deleted_too(
    open_disk: OpenDisk,
) -> None:
    class NoErasing(FaultyCalls):
        is_broken = True

        def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            if self.is_broken and len(buffers) == 1:
                raise OSError(errno.EIO, "told to")
            return super().pwritev(fd, buffers, offset)

    calls = NoErasing()
    async with open_disk(calls=calls) as tier:
        for _ in range(3):
            assert await store(tier, "k1/a") is DONE
        assert tier.statistics().lost_slots == 2
        assert list(await tier.delete(["k1/a"])) == [FAILED]
        calls.is_broken = False
        assert list(await tier.delete(["k1/a"])) == [DONE]
        assert not tier.statistics().lost_slots
    async with open_disk() as tier:
        assert await fetch(tier, "k1/a") is MISSING


async def test_a_full_disk_keeps_what_it_has_and_makes_room_in_that(
    calls: FaultyCalls, open_disk: OpenDisk, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_disk(calls=calls) as tier:
        assert await store(tier, "k1/a") is DONE
        calls.allocate_error = errno.ENOSPC
        for number in range(20):
            assert await store(tier, f"k1/{number}") is DONE
        assert await store(tier, "k1/other", 2**20) is REFUSED
        assert tier.statistics().file_bytes < 4 * 2**20
        assert lines_in(caplog) == 1
        calls.allocate_error = 0
        await tier.probe()
        assert await store(tier, "k1/other", 2**20) is DONE


async def test_a_disk_that_has_room_again_is_used_again(
    calls: FaultyCalls, open_disk: OpenDisk
) -> None:
    async with open_disk(calls=calls, full_retry_s=0) as tier:
        calls.allocate_error = errno.ENOSPC
        assert await store(tier, "k1/a") is REFUSED
        calls.allocate_error = 0
        assert await store(tier, "k1/a") is DONE


async def test_memory_that_is_full_refuses_and_leaves_no_file(
    open_disk: OpenDisk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise MemoryError

    async with open_disk() as tier:
        with monkeypatch.context() as patch:
            patch.setattr(room, "Segment", full)
            assert await store(tier, "k1/a") is REFUSED
        assert not files_in(tmp_path)
        await tier.probe()
        assert await store(tier, "k1/a") is DONE


async def test_of_a_disk_that_is_never_quite_full_it_takes_so_many_files_alone(
    open_disk: OpenDisk, tmp_path: Path
) -> None:
    class RoomForOne(FaultyCalls):
        def allocate(self, fd: int, nbytes: int) -> None:
            self.allocate_error = 0 if nbytes <= 2 * PAGE_NBYTES else errno.ENOSPC
            super().allocate(fd, nbytes)

    async with open_disk(calls=RoomForOne(), full_retry_s=0) as tier:
        for number in range(150):
            assert await store(tier, f"k1/{number}", 4) is DONE
        assert len(files_in(tmp_path)) <= 129


async def test_of_a_nearly_full_disk_it_takes_what_it_gets(
    calls: FaultyCalls, open_disk: OpenDisk
) -> None:
    calls.room_nbytes = 700_000
    async with open_disk(calls=calls) as tier:
        assert await store(tier, "k1/a") is DONE
        assert tier.statistics().file_bytes <= 700_000
        assert await fetch(tier, "k1/a") is DONE


async def test_a_disk_without_any_room_refuses(
    calls: FaultyCalls, open_disk: OpenDisk, tmp_path: Path
) -> None:
    calls.allocate_error = errno.ENOSPC
    async with open_disk(calls=calls) as tier:
        assert await store(tier, "k1/a") is REFUSED
        assert not files_in(tmp_path)


@pytest.mark.parametrize(
    ("most_nbytes", "refuses_direct"),
    [(4096, False), (2**17, False), (1000, True), (2**17 + 1, True)],
)
async def test_reads_and_writes_by_halves_go_on(
    most_nbytes: int, refuses_direct: bool, open_disk: OpenDisk
) -> None:
    calls = FaultyCalls(refuses_direct=refuses_direct)
    calls.most_nbytes = most_nbytes
    async with open_disk(calls=calls) as tier:
        for has_pages in (True, False):
            value = SomeValue("k1/a", NBYTES, 1, pieces=3, has_pages=has_pages)
            assert list(await tier.store([value.to_store()])) == [DONE]
            wanted = SomeValue("k1/a", NBYTES, pieces=2, has_pages=has_pages)
            assert list(await tier.fetch([wanted])) == [DONE]
            assert wanted.is_one_of(1)


async def test_a_disk_that_moves_nothing_has_failed(
    calls: FaultyCalls, open_disk: OpenDisk
) -> None:
    async with open_disk(calls=calls) as tier:
        assert await store(tier, "k1/a") is DONE
        calls.most_nbytes = 0
        assert await fetch(tier, "k1/a") is FAILED
        assert await store(tier, "k1/b") is FAILED


async def test_without_direct_io_it_works_and_says_so_once(
    open_disk: OpenDisk, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        caplog.clear()
        async with open_disk(calls=FaultyCalls(refuses_direct=True)) as tier:
            for nbytes in (100, NBYTES):
                assert await store(tier, f"k1/{nbytes}", nbytes) is DONE
                assert await fetch(tier, f"k1/{nbytes}", nbytes) is DONE
            assert not tier.statistics().is_direct
        assert lines_in(caplog) == 1
    async with open_disk() as tier:
        assert tier.statistics().is_direct
        assert await fetch(tier, f"k1/{NBYTES}") is DONE


@pytest.mark.parametrize("alignment", [0, 2**16, 3 * 512])
async def test_direct_io_that_asks_for_more_than_a_page_is_not_used(
    alignment: int, open_disk: OpenDisk
) -> None:
    class Asking(FaultyCalls):
        def alignment(self, fd: int) -> int | None:
            return alignment

    async with open_disk(calls=Asking()) as tier:
        assert await store(tier, "k1/a") is DONE
        assert not tier.statistics().is_direct


async def test_an_old_system_that_does_not_say_gets_direct_io(
    open_disk: OpenDisk,
) -> None:
    class Silent(FaultyCalls):
        def alignment(self, fd: int) -> int | None:
            return None

    async with open_disk(calls=Silent()) as tier:
        assert await store(tier, "k1/a") is DONE
        assert tier.statistics().is_direct


async def test_beside_a_read_that_never_returns_the_others_go_on(
    calls: FaultyCalls, open_disk: OpenDisk
) -> None:
    async with open_disk(calls=calls) as tier:
        for number in range(3):
            assert await store(tier, f"k1/{number}") is DONE
        calls.hangs = 3
        hanging = [asyncio.ensure_future(fetch(tier, f"k1/{n}")) for n in range(3)]
        await until(lambda: not calls.hangs)
        for number in range(20):
            assert await store(tier, f"k1/new {number}") is DONE
            assert await fetch(tier, f"k1/new {number}") is DONE
        assert not any(one.done() for one in hanging)
        calls.let_go()
        assert await asyncio.gather(*hanging) == [DONE] * 3


async def test_what_a_hanging_read_has_in_hand_goes_to_nobody_else(
    calls: FaultyCalls, open_disk: OpenDisk
) -> None:
    async with open_disk(2 * 2**20, calls=calls) as tier:
        assert await store(tier, "k1/a") is DONE
        calls.hangs = 1
        hanging = asyncio.ensure_future(fetch(tier, "k1/a"))
        await until(lambda: not calls.hangs)
        for number in range(20):
            assert await store(tier, f"k1/{number}") is DONE
        assert list(await tier.contains(["k1/a"])) == [DONE]
        calls.let_go()
        assert await hanging is DONE


async def test_a_tier_whose_threads_all_hang_is_closed_soon(
    calls: FaultyCalls, open_disk: OpenDisk, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_disk(calls=calls, threads=2, close_grace_s=0.05) as tier:
        for number in range(4):
            assert await store(tier, f"k1/{number}") is DONE
        calls.hangs = 2
        wanted = [asyncio.ensure_future(fetch(tier, f"k1/{n}")) for n in range(4)]
        await until(lambda: not calls.hangs)
        await tier.aclose()
        assert [one.done() for one in wanted] == [False, False, True, True]
        assert "hangs" in caplog.text
        second = DiskTier(tier.path, tier.max_bytes)
        with pytest.raises(ConfigError):  # what hangs may be a write
            await second.probe()
        await second.aclose()
        calls.let_go()
        results = await asyncio.gather(*wanted)
        assert results[2:] == [FAILED] * 2 and DONE not in results


async def test_a_closed_tier_does_nothing_any_more(open_disk: OpenDisk) -> None:
    async with open_disk() as tier:
        assert await store(tier, "k1/a") is DONE
        await tier.aclose()
        assert await fetch(tier, "k1/a") is FAILED
        assert await store(tier, "k1/b") is FAILED
        assert list(await tier.delete(["k1/a"])) == [FAILED]
        with pytest.raises(OSError, match="closed"):
            await tier.probe()
    async with open_disk() as tier:
        assert await fetch(tier, "k1/a") is DONE


async def test_a_tier_that_was_never_opened_has_nothing(tmp_path: Path) -> None:
    async with DiskTier(tmp_path / "kv", 2**20) as tier:
        assert await fetch(tier, "k1/a") is MISSING
        assert await store(tier, "k1/a") is FAILED
        assert list(await tier.contains(["k1/a"])) == [MISSING]
        assert list(await tier.delete(["k1/a"])) == [FAILED]
    assert not os.listdir(tmp_path)


SLOT_NBYTES = 81 * PAGE_NBYTES
USED_NBYTES = 200
"""More than a first page has of a header and its key here."""


async def fill(open_disk: OpenDisk, path: Path) -> Path:
    """Store four values, and return their file."""
    async with open_disk() as tier:
        for number in range(4):
            assert await store(tier, f"k1/{number}") is DONE
    (file,) = files_in(path)
    return file


async def outcome(tier: DiskTier, key: str) -> str:
    """Say what a store would: whatever is found and not right is a miss."""
    wanted = SomeValue(key, NBYTES)
    (result,) = await tier.fetch([wanted])
    if result is DONE and wanted.is_verified:
        assert wanted.is_one_of(1)
        return "right"
    return "torn" if result is DONE else result.value


@pytest.mark.parametrize("at", range(0, USED_NBYTES, 8))
async def test_a_flipped_bit_of_a_header_is_a_miss(
    at: int, open_disk: OpenDisk, tmp_path: Path
) -> None:
    file = await fill(open_disk, tmp_path)
    flip(file, SLOT_NBYTES + at)
    async with open_disk() as tier:
        outcomes = [await outcome(tier, f"k1/{number}") for number in range(4)]
        slots = tier.statistics().free_slots
        assert outcomes in (["right", "missing", "right", "right"], ["right"] * 4)
        assert tier.statistics().free_slots == slots
        assert await store(tier, "k1/1") is DONE


async def test_a_header_that_changes_while_it_is_known_is_a_miss_said_once(
    open_disk: OpenDisk, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_disk() as tier:
        for number in range(4):
            await store(tier, f"k1/{number}")
        for number in range(2):
            flip(files_in(tmp_path)[0], number * SLOT_NBYTES + 60)
        outcomes = [await outcome(tier, f"k1/{number}") for number in range(4)]
        assert outcomes == ["missing", "missing", "right", "right"]
        assert tier.statistics().unverified == 2 and lines_in(caplog) == 1
        assert list(await tier.contains(["k1/0", "k1/1"])) == [MISSING] * 2


async def test_a_flipped_bit_of_a_value_is_for_its_digest_to_find(
    open_disk: OpenDisk, tmp_path: Path
) -> None:
    file = await fill(open_disk, tmp_path)
    flip(file, 2 * SLOT_NBYTES + PAGE_NBYTES + NBYTES - 1)
    async with open_disk() as tier:
        assert [await outcome(tier, f"k1/{number}") for number in range(4)] == [
            *("right", "right", "torn", "right")
        ]


async def test_swapped_slots_are_misses(open_disk: OpenDisk, tmp_path: Path) -> None:
    file = await fill(open_disk, tmp_path)
    data = bytearray(file.read_bytes())
    first, second = slice(0, SLOT_NBYTES), slice(SLOT_NBYTES, 2 * SLOT_NBYTES)
    data[first], data[second] = data[second], data[first]
    file.write_bytes(data)
    async with open_disk() as tier:
        outcomes = [await outcome(tier, f"k1/{number}") for number in range(4)]
        assert outcomes == ["missing", "missing", "right", "right"]


async def test_a_header_over_the_bytes_of_another_value_is_torn(
    open_disk: OpenDisk, tmp_path: Path
) -> None:
    file = await fill(open_disk, tmp_path)
    data = bytearray(file.read_bytes())
    middle = SLOT_NBYTES + SLOT_NBYTES // 2
    data[middle : 2 * SLOT_NBYTES] = os.urandom(2 * SLOT_NBYTES - middle)
    file.write_bytes(data)
    async with open_disk() as tier:
        assert await outcome(tier, "k1/1") == "torn"


@pytest.mark.parametrize("kept", [0, 1, SLOT_NBYTES, 2 * SLOT_NBYTES + 5000])
async def test_of_a_truncated_file_the_rest_is_found(
    kept: int, open_disk: OpenDisk, tmp_path: Path
) -> None:
    os.truncate(await fill(open_disk, tmp_path), kept)
    async with open_disk() as tier:
        outcomes = [await outcome(tier, f"k1/{number}") for number in range(4)]
        whole = kept // SLOT_NBYTES
        assert outcomes == ["right"] * whole + ["missing"] * (4 - whole)
        assert await store(tier, "k1/new") is DONE
        assert await fetch(tier, "k1/new") is DONE


async def test_a_file_that_is_cut_while_it_is_open_is_a_failure(
    open_disk: OpenDisk, tmp_path: Path
) -> None:
    async with open_disk() as tier:
        assert await store(tier, "k1/a") is DONE
        os.truncate(files_in(tmp_path)[0], 2 * PAGE_NBYTES)
        assert await outcome(tier, "k1/a") == "failed"


async def test_slots_that_cannot_be_scanned_are_left_out(
    calls: FaultyCalls,
    open_disk: OpenDisk,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    await fill(open_disk, tmp_path)
    calls.read_error = errno.EIO
    async with open_disk(calls=calls) as tier:
        assert lines_in(caplog) == 1
        assert await outcome(tier, "k1/1") == "missing"
        assert list(await tier.delete(["k1/1"])) == [FAILED]  # it may be there
        calls.read_error = 0
        assert await store(tier, "k1/1") is DONE
    async with open_disk() as tier:
        assert [await outcome(tier, f"k1/{n}") for n in range(4)] == ["right"] * 4


async def test_after_less_room_was_configured_the_bound_holds(
    open_disk: OpenDisk, tmp_path: Path
) -> None:
    async with open_disk(32 * 2**20) as tier:
        for number in range(100):
            assert await store(tier, f"k1/{number}") is DONE
    async with open_disk(8 * 2**20) as tier:
        sizes = [file.stat().st_size for file in files_in(tmp_path)]
        assert sum(sizes) <= 8 * 2**20
        assert await store(tier, "k1/new") is DONE
        assert await fetch(tier, "k1/new") is DONE


@pytest.mark.parametrize("count", [None, 2**64 - 1, 2**23, 2**22])
async def test_the_lock_may_be_lost_or_garbage_without_harm(
    count: int | None, open_disk: OpenDisk, tmp_path: Path
) -> None:
    lock = tmp_path / "kv" / "lock"
    for seed in range(3):
        async with open_disk() as tier:
            value = SomeValue("k1/a", NBYTES, seed).to_store()
            assert list(await tier.store([value])) == [DONE]
        if count is None:
            lock.unlink()
        else:
            lock.write_bytes(count.to_bytes(8, "little"))
    async with open_disk() as tier:
        wanted = SomeValue("k1/a", NBYTES)
        assert list(await tier.fetch([wanted])) == [DONE] and wanted.is_one_of(2)


def flip(file: Path, at: int) -> None:
    with file.open("r+b") as opened:
        opened.seek(at)
        (byte,) = opened.read(1)
        opened.seek(at)
        opened.write(bytes([byte ^ 1 << at % 8]))
