from __future__ import annotations

import errno
import fcntl
import gc
import mmap
import os
import resource
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy
import pytest

from asynckv.tensors import slabs as slabs_module
from asynckv.tensors.slabs import (
    MAX_SLAB_NBYTES,
    MIN_SLAB_NBYTES,
    PAGE_NBYTES,
    IdleSlabs,
    Slabs,
    has_slabs,
    next_slab_nbytes,
)

pytestmark = pytest.mark.skipif(not has_slabs(), reason="no memory files here")


_MIB = 2**20


def _refuse_above(nbytes: int) -> Callable[[int, int, int], None]:
    """Return an allocation that fails where a file would get as large."""
    allocate = os.posix_fallocate

    def refusing(fd: int, start: int, count: int) -> None:
        if start + count > nbytes:
            raise OSError(errno.ENOSPC, "no memory")
        allocate(fd, start, count)

    return refusing


def test_it_grows_by_as_much_as_there_is_up_to_its_bound() -> None:
    slabs = Slabs(50 * _MIB + 1)
    assert slabs.max_bytes == 50 * _MIB + PAGE_NBYTES
    assert [slabs.grow() for _ in range(4)] == [
        MIN_SLAB_NBYTES,
        MIN_SLAB_NBYTES,
        50 * _MIB + PAGE_NBYTES - 2 * MIN_SLAB_NBYTES,
        0,
    ]
    assert slabs.nbytes == slabs.max_bytes


def test_a_slab_is_never_larger_than_its_limit() -> None:
    large = 8 * MAX_SLAB_NBYTES
    assert next_slab_nbytes(3 * MAX_SLAB_NBYTES, large) == MAX_SLAB_NBYTES
    assert next_slab_nbytes(large - 4096, large) == 4096


def test_nothing_is_allocated_before_it_grows() -> None:
    slabs = Slabs(2**40)
    assert os.fstat(slabs.fileno()).st_blocks == 0
    slabs.grow()
    assert os.fstat(slabs.fileno()).st_blocks * 512 == MIN_SLAB_NBYTES


def test_a_slab_that_was_grown_can_be_written_without_a_fault() -> None:
    slabs = Slabs(MIN_SLAB_NBYTES)
    slabs.grow()
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    slabs.memory[:] = 7
    assert resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before < 100
    assert slabs.memory[-1] == 7


def test_the_file_is_sealed_and_closed_on_exec() -> None:
    slabs = Slabs(_MIB)
    fd = slabs.fileno()
    seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    assert seals & fcntl.F_SEAL_SHRINK
    assert seals & fcntl.F_SEAL_GROW
    assert not os.get_inheritable(fd)
    with pytest.raises(PermissionError):
        os.ftruncate(fd, 0)


def test_constant_memory_shows_what_is_written_and_cannot_be_written() -> None:
    slabs = Slabs(_MIB)
    slabs.grow()
    constant = slabs.constant
    slabs.memory[5] = 9
    assert constant[5] == 9
    assert not constant.flags.writeable
    assert slabs.constant is constant


def test_half_a_slab_is_taken_where_a_whole_one_cannot_be_had(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "posix_fallocate", _refuse_above(9 * _MIB))
    monkeypatch.setattr(slabs_module, "_PIECE_NBYTES", _MIB)
    slabs = Slabs(64 * _MIB)
    assert slabs.grow() == 8 * _MIB
    assert slabs.grow() == _MIB  # 16, 8, 4, 2, 1
    assert slabs.grow() == 0
    assert slabs.nbytes == 9 * _MIB


def test_a_mapping_outlives_what_it_was_made_by() -> None:
    slabs = Slabs(_MIB)
    slabs.grow()
    view = slabs.memory[:8].data
    slabs.close()
    slabs.close()
    assert slabs.fileno() < 0
    del slabs
    gc.collect()
    view[:] = b"12345678"
    assert bytes(view) == b"12345678"


def test_nothing_is_left_open_or_mapped() -> None:
    gc.collect()  # of others
    fds, mappings = len(os.listdir("/proc/self/fd")), _mappings()
    slabs = Slabs(3 * 2**40)
    assert _mappings() > mappings
    del slabs
    assert len(os.listdir("/proc/self/fd")) == fds
    assert _mappings() == mappings


def _mappings() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:asynckv")


def test_growing_ends_soon_when_it_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    slabs = Slabs(2**40)
    slabs.nbytes = 2**30
    allocate = os.posix_fallocate

    def close_and_allocate(fd: int, start: int, count: int) -> None:
        slabs.close()
        allocate(fd, start, count)  # the file is not closed under it

    monkeypatch.setattr(os, "posix_fallocate", close_and_allocate)
    assert slabs.grow() == 0
    assert slabs.nbytes == 2**30
    assert slabs.fileno() < 0


def test_an_old_kernel_that_does_not_populate_is_no_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(slabs_module, "_MADV_POPULATE_WRITE", 9999)
    slabs = Slabs(_MIB)
    assert slabs.grow() == _MIB
    slabs.memory[:] = 1


@pytest.mark.parametrize("step", ["allocated", "populated"])
def test_other_threads_run_while_a_slab_is(
    step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("MIN_SLAB_NBYTES", "_PIECE_NBYTES"):
        monkeypatch.setattr(slabs_module, name, 128 * _MIB)
    if step == "allocated":
        monkeypatch.setattr(slabs_module, "_populate", lambda piece: None)
    else:  # which allocates too, where nothing has been
        monkeypatch.setattr(os, "posix_fallocate", lambda fd, start, nbytes: None)
    shares = [_share_beside(Slabs(128 * _MIB).grow) for _ in range(3)]
    assert max(shares) > 0.4


def _share_beside(work: Callable[[], object]) -> float:
    """Return how much this thread could do beside ``work`` in another, of as much.

    In the processor's time: other processes take from both threads alike.
    """
    used_s = []

    def measured() -> None:
        begun_s = time.thread_time()
        work()
        used_s.append(time.thread_time() - begun_s)

    thread = threading.Thread(target=measured)
    begun_s = time.thread_time()
    thread.start()
    while thread.is_alive():
        pass
    return (time.thread_time() - begun_s) / used_s[0]


def test_a_region_may_lie_across_slabs() -> None:
    slabs = Slabs(3 * MIN_SLAB_NBYTES)
    slabs.grow(), slabs.grow()
    across = slabs.memory[MIN_SLAB_NBYTES - 4 : MIN_SLAB_NBYTES + 4]
    across[:] = numpy.arange(8)
    assert across.tolist() == list(range(8))


def test_no_file_descriptor_is_an_os_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_more(name: str, flags: int) -> int:
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr(os, "memfd_create", no_more)
    with pytest.raises(OSError, match="too many"):
        Slabs(mmap.PAGESIZE)


def test_a_forked_child_allocates_and_clears_nothing_of_its_parents() -> None:
    slabs = Slabs(4 * MIN_SLAB_NBYTES)
    slabs.grow()
    slabs.memory[: slabs.nbytes] = 7
    blocks = os.fstat(slabs.fileno()).st_blocks
    if not (pid := os.fork()):
        grown = slabs.grow()
        slabs.clear([(0, 1)])
        slabs.close()
        os._exit(bool(grown) or slabs.fileno() >= 0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert os.fstat(slabs.fileno()).st_blocks == blocks
    assert bool((slabs.memory[: slabs.nbytes] == 7).all())


def test_idle_pages_are_given_back_while_views_of_others_live() -> None:
    slabs = Slabs(MIN_SLAB_NBYTES)
    slabs.grow()
    view, copy = slabs.memory[PAGE_NBYTES : 2 * PAGE_NBYTES], os.dup(slabs.fileno())
    view[:] = 7
    idle = IdleSlabs(slabs, [(0, 1), (2, MIN_SLAB_NBYTES // PAGE_NBYTES - 2)])
    slabs.close()
    del slabs
    for _ in range(2):
        idle.drop()
    assert os.fstat(copy).st_blocks * 512 == PAGE_NBYTES
    assert bool((view == 7).all())
    del view
    os.close(copy)
