from __future__ import annotations

import errno
import weakref
from collections.abc import Iterator

import numpy
import pytest

from asynckv.tensors import slab_pages as slab_pages_module, slabs as slabs_module
from asynckv.tensors.slab_pages import Place, SlabPages
from asynckv.tensors.slabs import MIN_SLAB_NBYTES, PAGE_NBYTES, has_slabs

pytestmark = pytest.mark.skipif(not has_slabs(), reason="no memory files here")

_MIB = 2**20


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


def _with_gaps(pages: SlabPages) -> list[Place]:
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
    _with_gaps(pages)
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
    _with_gaps(pages)
    (place,) = pages.take([3 * _MIB]) or []
    assert pages.take([4 * _MIB]) is None
    pages.free(place[0])
    assert pages.take([3 * _MIB]) is not None


def test_where_no_more_can_be_mapped_there_is_room_all_the_same(
    pages: SlabPages, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(fd: int, runs: object, *, writable: bool) -> None:
        raise OSError(errno.ENOMEM, "too many mappings")

    _with_gaps(pages)
    monkeypatch.setattr(slabs_module, "stitch", refuse)
    (place,) = pages.take([4 * _MIB]) or []
    with pytest.raises(OSError, match="mappings"):
        pages.memory_of(place[0], writable=True)
    assert len(pages.spans_of(place[0], 0, 4 * _MIB)[1]) == 4
    monkeypatch.undo()
    assert pages.memory_of(place[0], writable=True).nbytes == 4 * _MIB


def test_bytes_that_lie_apart_are_found_where_they_are(pages: SlabPages) -> None:
    _with_gaps(pages)
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
    _with_gaps(pages)
    (place,) = pages.take([2 * _MIB]) or []
    mapped = weakref.ref(pages.memory_of(place[0], writable=True))
    assert mapped() is not None
    pages.free(place[0])
    assert mapped() is None
