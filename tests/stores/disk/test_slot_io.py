"""Bytes go to a slot and back, in as many pieces as they come, and nothing beside."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from asynckv.abc.tiers import TierMemory, TierResult
from asynckv.stores.disk.calls import PAGE_NBYTES, FileCalls
from asynckv.testing.tier_checks import SomeValue, own_memory
from harness.disk_faults import FaultyCalls, OpenDisk

DONE = TierResult.DONE


@pytest.mark.parametrize("refuses_direct", [False, True])
async def test_more_pieces_than_one_call_takes(
    refuses_direct: bool, open_disk: OpenDisk
) -> None:
    calls = FaultyCalls(refuses_direct=refuses_direct)
    async with open_disk(64 * 2**20, calls=calls) as tier:
        nbytes = 1500 * PAGE_NBYTES - 1
        value = SomeValue("k1/a", nbytes, 1, pieces=1500)
        assert list(await tier.store([value.to_store()])) == [DONE]
        for pieces in (1500, 1):
            wanted = SomeValue("k1/a", nbytes, pieces=pieces)
            assert list(await tier.fetch([wanted])) == [DONE]
            assert wanted.is_one_of(1)


@pytest.mark.parametrize("refuses_direct", [False, True])
@pytest.mark.parametrize("has_pages", [False, True])
async def test_what_follows_a_value_in_its_page_is_zero(
    has_pages: bool, refuses_direct: bool, open_disk: OpenDisk, tmp_path: Path
) -> None:
    calls = FaultyCalls(refuses_direct=refuses_direct)
    async with open_disk(calls=calls) as tier:
        for key, nbytes in (("k1/a", 300_000), ("k1/b", 290_001)):
            value = SomeValue(key, nbytes, 1, has_pages=has_pages).to_store()
            for page in value.memory.pages:
                page[nbytes:] = b"?" * (len(page) - nbytes)
            assert list(await tier.store([value])) == [DONE]
    (file,) = (tmp_path / "kv").glob("*.slots")
    data = file.read_bytes()
    ends = [PAGE_NBYTES + 300_000, (81 + 1) * PAGE_NBYTES + 290_001]
    for end in ends:
        assert not any(data[end : -(-end // PAGE_NBYTES) * PAGE_NBYTES])
        assert any(data[end - 16 : end])


async def test_pages_are_read_and_written_where_they_are(open_disk: OpenDisk) -> None:
    seen: list[tuple[int, ...]] = []

    class Watching(FaultyCalls):
        def pwritev(self, fd: int, buffers: list[memoryview], offset: int) -> int:  # type: ignore[override]
            seen.append(tuple(map(len, buffers)))
            return super().pwritev(fd, buffers, offset)

    async with open_disk(calls=Watching()) as tier:
        value = SomeValue("k1/a", 300_000, 1, pieces=2).to_store()
        assert list(await tier.store([value])) == [DONE]
    assert seen == [(4096, 151_552, 147_456, 4096)]


async def test_a_place_of_another_length_is_not_written_to(open_disk: OpenDisk) -> None:
    async with open_disk() as tier:
        for nbytes in (100, 300_000):
            stored = SomeValue("k1/a", nbytes, 1).to_store()
            assert list(await tier.store([stored])) == [DONE]
            wanted = SomeValue("k1/a", nbytes + 1)
            assert list(await tier.fetch([wanted])) == [TierResult.MISSING]
            assert not any(wanted.data)


class Broken(SomeValue):
    """Has no idea where to go."""

    async def place(self, header: bytes | memoryview) -> TierMemory | None:
        raise RuntimeError("a bug")


class Unending(SomeValue):
    """Asks for more of a header than there is."""

    async def place(self, header: bytes | memoryview) -> TierMemory | None:
        self.header_nbytes = len(header) + 1
        raise ValueError("too short")


async def test_who_cannot_say_where_a_value_goes_does_not_get_it(
    open_disk: OpenDisk, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_disk() as tier:
        await tier.store([SomeValue("k1/a", 100, 1).to_store()])
        results = await tier.fetch([Broken("k1/a"), Unending("k1/a")])
        assert list(results) == [TierResult.FAILED, TierResult.MISSING]
        assert "a bug" in caplog.text
        wanted = SomeValue("k1/a", 100)
        assert list(await tier.fetch([wanted])) == [DONE] and wanted.is_one_of(1)


async def test_so_many_small_values_are_read_at_once(open_disk: OpenDisk) -> None:
    async with open_disk() as tier:
        keys = [f"k1/{number}" for number in range(70)]
        await tier.store(
            [SomeValue(key, 100, at).to_store() for at, key in enumerate(keys)]
        )
        before = tier.statistics().buffer_bytes
        for _ in range(2):
            wanted = [SomeValue(key, 100) for key in keys]
            assert set(await tier.fetch(wanted)) == {DONE}
            assert all(one.is_one_of(at) for at, one in enumerate(wanted))
        assert before < tier.statistics().buffer_bytes < 10 * 2**20


def test_the_system_says_what_direct_io_asks_for(tmp_path: Path) -> None:
    calls = FileCalls()
    fd = calls.open(str(tmp_path / "file"), is_direct=False)
    try:
        alignment = calls.alignment(fd)
        assert alignment is None or PAGE_NBYTES % max(alignment, 1) == 0
    finally:
        os.close(fd)


def test_memory_of_the_checks_begins_at_pages_or_does_not() -> None:
    assert [len(page) for page in own_memory(5000, 2).pages] == [4096, 4096]
    assert not own_memory(5000, 2, has_pages=False).pages
