"""One process has a directory; what it made there, the next one finds."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from asynckv.errors import ConfigError
from asynckv.stores.disk.calls import PAGE_NBYTES, FileCalls
from asynckv.stores.disk.directory import SlotDirectory


def directory(path: Path) -> SlotDirectory:
    return SlotDirectory(path / "kv", 2**20, FileCalls())


def test_it_counts_how_often_it_was_opened(tmp_path: Path) -> None:
    counts = []
    for _ in range(3):
        one = directory(tmp_path)
        counts.append(one.open())
        one.close()
    assert counts == sorted(set(counts))


def test_a_file_is_there_as_it_was_made(tmp_path: Path) -> None:
    one = directory(tmp_path)
    one.open()
    made = one.create(3, 4)
    assert made.path.stat().st_size == 4 * 3 * PAGE_NBYTES
    one.close()
    other = directory(tmp_path)
    other.open()
    (found,) = other.files.values()
    assert (found.pages, found.count, found.number) == (3, 4, made.number)
    other.close()


def test_a_file_that_is_removed_gives_its_room_back(tmp_path: Path) -> None:
    one = directory(tmp_path)
    one.open()
    made = one.create(1, 8)
    one.remove(made.number)
    assert not made.path.exists()
    assert not one.files
    one.close()


def test_of_two_files_of_one_number_one_is_kept(tmp_path: Path) -> None:
    one = directory(tmp_path)
    one.open()
    made = one.create(1, 8)
    one.close()
    other = made.path.with_name("000000-2.slots")
    other.write_bytes(bytes(8 * PAGE_NBYTES))
    one = directory(tmp_path)
    one.open()
    assert [file.path for file in one.files.values()] == [made.path]
    assert not other.exists()
    one.close()


def test_a_file_that_cannot_be_removed_is_closed(tmp_path: Path) -> None:
    one = directory(tmp_path)
    one.open()
    made = one.create(1, 8)
    made.path.unlink()
    made.path.mkdir()
    with pytest.raises(OSError):
        one.remove(made.number)
    assert made.fd < 0
    one.close()


def test_a_child_that_was_forked_meanwhile_keeps_nobody_from_it(
    tmp_path: Path,
) -> None:
    class ForkedCalls(FileCalls):
        def lock(self, fd: int) -> None:
            super().lock(fd)
            inherited.append(os.dup(fd))

    inherited: list[int] = []
    one = SlotDirectory(tmp_path / "kv", 2**20, ForkedCalls())
    one.open()
    one.close()
    other = directory(tmp_path)
    other.open()
    other.close()
    os.close(inherited.pop())


def test_another_process_is_refused_while_one_has_it(tmp_path: Path) -> None:
    one, other = directory(tmp_path), directory(tmp_path)
    one.open()
    with pytest.raises(ConfigError, match="in use"):
        other.open()
    one.close()
    other.open()
    other.close()
