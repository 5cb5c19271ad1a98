from __future__ import annotations

import errno
import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from asynckv.tensors.slabs import PAGE_NBYTES, has_slabs
from asynckv.tensors.stitching import stitch

pytestmark = pytest.mark.skipif(not has_slabs(), reason="no memory files here")

_RUNS = [(5 * PAGE_NBYTES, PAGE_NBYTES), (PAGE_NBYTES, 2 * PAGE_NBYTES)]


@pytest.fixture
def fd() -> Iterator[int]:
    fd = os.memfd_create("stitched")
    os.ftruncate(fd, 8 * PAGE_NBYTES)
    for page in range(8):
        os.pwrite(fd, bytes([page]) * PAGE_NBYTES, page * PAGE_NBYTES)
    yield fd
    os.close(fd)


def _mappings() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:stitched")


def test_pages_that_lie_apart_are_one_array(fd: int) -> None:
    array = stitch(fd, _RUNS, writable=True)
    assert array[::PAGE_NBYTES].tolist() == [5, 1, 2]
    array[2 * PAGE_NBYTES - 1] = 77
    assert os.pread(fd, 2, 2 * PAGE_NBYTES - 1) == bytes([77, 2])


def test_it_is_unmapped_with_the_last_array_over_it(fd: int) -> None:
    part = stitch(fd, _RUNS, writable=True)[PAGE_NBYTES:][:8].data
    assert _mappings() == 2
    assert part[0] == 1
    del part
    gc.collect()
    assert _mappings() == 0


def test_what_is_not_writable_cannot_be_written(fd: int) -> None:
    array = stitch(fd, _RUNS, writable=False)
    assert not array.flags.writeable
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 1
    assert "r--s" in Path("/proc/self/maps").read_text().split("/memfd:stitched")[0]


def test_writing_to_it_nevertheless_is_a_crash(fd: int) -> None:
    program = (
        "import ctypes, os; from asynckv.tensors.stitching import stitch; "
        "fd = os.memfd_create('x'); os.ftruncate(fd, 8192); "
        "array = stitch(fd, [(0, 8192)], writable=False); "
        "ctypes.memset(array.ctypes.data, 1, 1)"
    )
    code = subprocess.run([sys.executable, "-c", program], check=False).returncode
    assert code == -11


def test_a_closed_file_is_an_os_error_and_nothing_stays_mapped(fd: int) -> None:
    with pytest.raises(OSError, match="descriptor") as caught:
        stitch(-1, _RUNS, writable=True)
    assert caught.value.errno == errno.EBADF
    del caught
    assert _mappings() == 0


def test_a_private_array_may_be_larger_than_all_memory() -> None:
    fd = os.memfd_create("large")
    os.ftruncate(fd, 2**42)
    array = stitch(fd, [(0, 2**42)], writable=True, is_private=True)
    array[-1] = 7
    assert array.nbytes == 2**42
    os.close(fd)
