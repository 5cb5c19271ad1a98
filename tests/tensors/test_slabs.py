from __future__ import annotations

import errno
import fcntl
import gc
import mmap
import os
import resource
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy
import pytest

from asynckv.tensors import slab_pages as slab_pages_module, slabs as slabs_module
from asynckv.tensors.slab_pages import Place, SlabPages
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


@pytest.mark.parametrize("writable", [True, False])
def test_a_run_of_pages_is_all_of_its_bytes(writable: bool) -> None:
    slabs = Slabs(MIN_SLAB_NBYTES)
    slabs.grow()
    for runs, pages in (((), 0), (((1, 2),), 2), (((3, 1), (1, 1)), 2)):
        memory = slabs.of_runs(runs, writable=writable)
        assert len(memory) == pages * PAGE_NBYTES
    slabs.close()


class Wanted:
    def __init__(self) -> None:
        self.times = 0

    def __call__(self) -> None:
        self.times += 1


@pytest.fixture
def wanted() -> Wanted:
    return Wanted()


@pytest.fixture
def pages(wanted: Wanted) -> Iterator[SlabPages]:
    pages = SlabPages(2 * MIN_SLAB_NBYTES, wanted)
    yield pages
    pages.close()
    pages.unmap()


def _grow(pages: SlabPages) -> None:
    while pages.is_growing:
        assert pages.add_slab(pages.make_slab())


def _pages_with_gaps(pages: SlabPages) -> list[Place]:
    """Let every second MiB of all slabs be free; return the others' places."""
    _grow(pages)
    taken = pages.take([_MIB] * 32) or []
    taken.sort(key=lambda place: place[0].runs[0])
    for place in taken[::2]:
        pages.free(place[0])
    return taken[1::2]


def test_slabs_are_wanted_until_all_are_there(pages: SlabPages, wanted: Wanted) -> None:
    assert pages.take([_MIB]) is None
    assert wanted.times == 0
    pages.want()
    assert wanted.times == 1
    _grow(pages)
    assert pages.nbytes == pages.free_bytes == 2 * MIN_SLAB_NBYTES
    pages.want()
    assert wanted.times == 1


def test_nothing_is_wanted_of_closed_pages(pages: SlabPages, wanted: Wanted) -> None:
    pages.close()
    pages.want()
    assert wanted.times == 0


def test_what_fits_now_is_less_than_what_could_ever_fit(pages: SlabPages) -> None:
    sizes = [20 * _MIB, 12 * _MIB]
    assert pages.could_ever_fit(sizes)
    assert not pages.could_ever_fit([*sizes, 1])
    assert not pages.fits(sizes)
    _grow(pages)
    assert pages.fits(sizes)


def test_too_small_a_slab_is_the_last(pages: SlabPages) -> None:
    nbytes = pages.make_slab()
    assert nbytes == MIN_SLAB_NBYTES
    assert not pages.add_slab(nbytes - PAGE_NBYTES)
    assert not pages.is_growing
    assert not pages.could_ever_fit([MIN_SLAB_NBYTES])
    assert pages.is_usable


def test_pages_can_be_had_without_their_memory(pages: SlabPages) -> None:
    _pages_with_gaps(pages)
    (place,) = pages.take([2 * _MIB]) or []
    assert len(place[0].runs) == 2
    assert place[0].memory is None
    pages.free(place[0])
    assert pages.free_bytes == 16 * _MIB


def test_pages_outlive_no_slabs(pages: SlabPages) -> None:
    _grow(pages)
    (place,) = pages.take([_MIB]) or []
    memory = pages.memory_of(place[0], writable=False)
    assert memory.nbytes == _MIB
    pages.unmap()
    with pytest.raises(RuntimeError):
        pages.memory_of(place[0], writable=False)
    assert memory[0] == 0


@pytest.mark.parametrize("limit", ["_MAX_RUNS", "_MAX_STITCHED_RUNS"])
def test_nothing_is_in_more_pieces_than_there_may_be(
    limit: str, pages: SlabPages, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slab_pages_module, limit, 3)
    _pages_with_gaps(pages)
    (place,) = pages.take([3 * _MIB]) or []
    assert pages.take([4 * _MIB]) is None
    pages.free(place[0])
    assert pages.take([3 * _MIB]) is not None


def test_where_no_more_can_be_mapped_there_is_room_all_the_same(
    pages: SlabPages, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(fd: int, runs: object, *, writable: bool) -> None:
        raise OSError(errno.ENOMEM, "too many mappings")

    _pages_with_gaps(pages)
    monkeypatch.setattr(slabs_module, "stitch", refuse)
    (place,) = pages.take([4 * _MIB]) or []
    with pytest.raises(OSError, match="mappings"):
        pages.memory_of(place[0], writable=True)
    assert len(pages.spans_of(place[0], 0, 4 * _MIB)[1]) == 4
    monkeypatch.undo()
    assert pages.memory_of(place[0], writable=True).nbytes == 4 * _MIB


def test_bytes_that_lie_apart_are_found_where_they_are(pages: SlabPages) -> None:
    _pages_with_gaps(pages)
    (place,) = pages.take([3 * _MIB]) or []
    whole = pages.memory_of(place[0], writable=True)
    whole[:] = numpy.arange(3 * _MIB) % 251
    memory, spans = pages.spans_of(place[0], _MIB - 3, _MIB + 8)
    assert [stop - start for start, stop in spans] == [3, _MIB, 5]
    found = numpy.concatenate([memory[start:stop] for start, stop in spans])
    assert numpy.array_equal(found, whole[_MIB - 3 : 2 * _MIB + 5])
    assert pages.spans_of(place[0], 3 * _MIB, 0)[1] == []


def test_pages_that_lay_apart_are_mapped_no_longer_than_they_are_taken(
    pages: SlabPages,
) -> None:
    _pages_with_gaps(pages)
    (place,) = pages.take([2 * _MIB]) or []
    mapped = weakref.ref(pages.memory_of(place[0], writable=True))
    assert mapped() is not None
    pages.free(place[0])
    assert mapped() is None
