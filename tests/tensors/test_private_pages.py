from __future__ import annotations

import ctypes
import gc
import mmap
import os
from pathlib import Path

import pytest

from asynckv.tensors import stitching as private_pages
from asynckv.tensors.slabs import PAGE_NBYTES, has_slabs
from asynckv.tensors.stitching import PrivatePages, stitch

pytestmark = pytest.mark.skipif(not has_slabs(), reason="no memory files here")

NBYTES = 16 * PAGE_NBYTES
FIRST = (0, 2 * PAGE_NBYTES)
SECOND = (4 * PAGE_NBYTES, 3 * PAGE_NBYTES)
_PAGEOUT = 21
_ONFAULT = 1
_libc = ctypes.CDLL(None, use_errno=True)


class Mapped:
    """A file of one byte's value a page, and a private mapping of it."""

    def __init__(self) -> None:
        fd = os.memfd_create("test", os.MFD_CLOEXEC)
        os.ftruncate(fd, NBYTES)
        self.owner = stitch(fd, [(0, NBYTES)], writable=True)
        self.fd = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
        os.close(fd)
        self.pages = PrivatePages(self.fd, NBYTES)
        self.memory = self.pages.memory
        self.address: int = self.memory.ctypes.data
        self.owner[:] = 1

    def __del__(self) -> None:
        self.pages.close()
        os.close(self.fd)

    def write(self, *runs: tuple[int, int]) -> bool:
        """Write all of ``runs`` in a delivery that has them; tell if it got them."""
        claim = self.pages.claim(runs)
        if claim is None:
            return False
        for offset, nbytes in runs:
            self.memory[offset : offset + nbytes] = 7
        claim.shown += runs
        self.pages.release(claim)
        return True

    def shows_what_the_owner_writes(self) -> bool:
        self.owner[:] += 1
        return bool((self.memory == self.owner).all())


def test_what_was_written_is_nobody_else_s_and_is_gone_after_the_release() -> None:
    mapped = Mapped()
    assert mapped.write(FIRST, SECOND)
    assert (mapped.owner == 1).all()
    assert mapped.shows_what_the_owner_writes()


def test_a_mapping_lives_until_what_looks_through_it_has_ended() -> None:
    mapped = Mapped()
    claim = mapped.pages.claim([FIRST])
    assert claim is not None
    claim.shown.append(FIRST)
    pages, address = mapped.pages, f"{mapped.address:x}-"
    pages.close()
    del mapped.memory
    gc.collect()
    assert address in Path("/proc/self/maps").read_text()
    pages.release(claim)


def test_pages_are_one_delivery_s_at_a_time() -> None:
    mapped = Mapped()
    claim = mapped.pages.claim([FIRST, SECOND])
    assert claim is not None
    assert mapped.pages.claim([(PAGE_NBYTES, PAGE_NBYTES)]) is None
    assert mapped.pages.claim([(2 * PAGE_NBYTES, PAGE_NBYTES)]) is not None
    mapped.pages.release(claim)
    assert mapped.pages.claim([FIRST]) is not None


def test_without_a_page_map_pages_are_mapped_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opened = os.open

    def without_page_map(path: str, flags: int) -> int:
        if "pagemap" in path:
            raise PermissionError
        return opened(path, flags)

    monkeypatch.setattr("os.open", without_page_map)
    mapped = Mapped()
    assert mapped.write(FIRST) and mapped.write(FIRST, SECOND)
    assert mapped.shows_what_the_owner_writes()


def test_pages_that_are_locked_are_mapped_again() -> None:
    mapped = Mapped()
    claim = mapped.pages.claim([FIRST, SECOND])
    assert claim is not None
    offset, nbytes = SECOND
    assert not _libc.mlock(ctypes.c_void_p(mapped.address + offset), nbytes)
    claim.shown += (FIRST, SECOND)
    mapped.pages.release(claim)
    assert mapped.shows_what_the_owner_writes()


@pytest.mark.parametrize("has_page_map", [True, False])
def test_what_can_be_neither_dropped_nor_mapped_is_shown_to_nobody(
    has_page_map: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*arguments: int) -> None:
        raise OSError("no more mappings")

    mapped = Mapped()
    if not has_page_map:
        monkeypatch.setattr("os.pread", fails)
    monkeypatch.setattr(private_pages, "map_again", fails)
    monkeypatch.setattr(private_pages, "drop", lambda address, nbytes: nbytes == 4096)
    assert mapped.write(FIRST, SECOND)
    assert not mapped.write(FIRST)
    assert not mapped.write(SECOND)
    assert mapped.write((3 * PAGE_NBYTES, PAGE_NBYTES))


def test_whoever_copies_every_page_gets_none_from_before_the_first_one_on() -> None:
    mapped = Mapped()
    # As mlockall() does, from the first address on, with what may be written.
    before = ctypes.c_void_p(mapped.address - PAGE_NBYTES)
    assert not _libc.mlock(before, PAGE_NBYTES)
    assert all(mapped.pages.claim([FIRST]) is None for _ in range(3))
    assert not _libc.munlock(before, PAGE_NBYTES)  # which makes no copy undone
    assert mapped.pages.claim([FIRST]) is None


def test_pages_that_are_locked_as_they_are_used_are_dropped_all_the_same() -> None:
    mapped = Mapped()
    everything = ctypes.c_void_p(mapped.address - PAGE_NBYTES)
    assert not _libc.mlock2(everything, PAGE_NBYTES + NBYTES, _ONFAULT)
    assert mapped.write(FIRST) and mapped.write(FIRST, SECOND)
    assert mapped.shows_what_the_owner_writes()


@pytest.mark.skipif(
    len(Path("/proc/swaps").read_text().splitlines()) < 2, reason="no swap here"
)
def test_what_was_written_and_swapped_out_is_dropped_too() -> None:
    mapped = Mapped()
    claim = mapped.pages.claim([SECOND])
    assert claim is not None
    offset, nbytes = SECOND
    mapped.memory[offset : offset + nbytes] = 7
    _libc.madvise(ctypes.c_void_p(mapped.address + offset), nbytes, _PAGEOUT)
    claim.shown.append(SECOND)
    mapped.pages.release(claim)
    assert mapped.shows_what_the_owner_writes()


def test_after_the_close_nothing_is_touched_any_more() -> None:
    mapped = Mapped()
    claim = mapped.pages.claim([FIRST])
    assert claim is not None
    mapped.memory[: FIRST[1]] = 7
    claim.shown.append(FIRST)
    mapped.pages.close()
    mapped.pages.release(claim)
    assert (mapped.memory[: FIRST[1]] == 7).all()


def test_a_private_mapping_dies_with_its_last_array() -> None:
    mapped = Mapped()
    part = mapped.memory[: mmap.PAGESIZE]
    address = f"{mapped.address:x}-"
    del mapped
    gc.collect()
    assert address in Path("/proc/self/maps").read_text()
    del part
    assert address not in Path("/proc/self/maps").read_text()
