from __future__ import annotations

import errno
import random
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import numpy
import pytest
from hypothesis import given, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from asynckv.tensors import pages as pages_module, slabs as slabs_module
from asynckv.tensors.pages import (
    PageAllocator,
    Pages,
    Place,
    SlabPages,
    pack,
    pages_of,
)
from asynckv.tensors.slabs import MIN_SLAB_NBYTES, PAGE_NBYTES, has_slabs

_MIB = 2**20

needs_slabs = pytest.mark.skipif(not has_slabs(), reason="no memory files here")


_PAGE, _LARGEST = 4096, 16 * 2**20


_Draw: TypeAlias = Callable[[random.Random, int], list[int]]


class PagesOneByOne(RuleBasedStateMachine):
    """Knows of each page whether it is taken."""

    def __init__(self) -> None:
        super().__init__()
        self.allocator = PageAllocator()
        self.is_taken: list[bool] = []
        self.blocks: list[tuple[int, int]] = []

    @rule(pages=st.integers(1, 300))
    def extend(self, pages: int) -> None:
        self.allocator.extend(pages)
        self.is_taken += [False] * pages

    @rule(
        blocks=st.lists(st.integers(0, 300) | st.integers(0, 20), min_size=1),
        max_runs=st.sampled_from((1, 2, 1000)),
    )
    def allocate(self, blocks: list[int], max_runs: int) -> None:
        fits = self.allocator.fits(blocks, max_runs=max_runs)
        free = self.free_runs()
        largest = sorted((n for _, n in free), reverse=True)
        taken = self.allocator.allocate(blocks, max_runs=max_runs)
        assert fits is (taken is not None)
        if len(blocks) == 1:
            assert fits is (blocks[0] <= sum(largest[:max_runs]))
        if taken is None:
            assert list(self.allocator.free_blocks()) == free
            return
        for runs, pages in zip(taken, blocks, strict=True):
            assert sum(count for _, count in runs) == pages
            assert len(runs) <= max_runs
            for run in runs:
                self.take(*run)

    @precondition(lambda self: self.blocks)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.blocks) - 1))
        first, pages = self.blocks.pop(index)
        self.allocator.free(first, pages)
        self.is_taken[first : first + pages] = [False] * pages

    @invariant()
    def free_blocks_are_the_free_pages(self) -> None:
        runs = self.free_runs()
        assert list(self.allocator.free_blocks()) == runs
        assert self.allocator.free_pages == sum(pages for _, pages in runs)
        assert self.allocator.largest_free == max((n for _, n in runs), default=0)
        assert self.allocator.pages == len(self.is_taken)

    def take(self, first: int, pages: int) -> None:
        assert first + pages <= len(self.is_taken)
        assert not any(self.is_taken[first : first + pages])
        self.is_taken[first : first + pages] = [True] * pages
        if pages:
            self.blocks.append((first, pages))

    def free_runs(self) -> list[tuple[int, int]]:
        runs: list[tuple[int, int]] = []
        for page, is_taken in enumerate(self.is_taken):
            if is_taken:
                continue
            if runs and sum(runs[-1]) == page:
                runs[-1] = runs[-1][0], runs[-1][1] + 1
            else:
                runs.append((page, 1))
        return runs


TestPagesOneByOne = PagesOneByOne.TestCase
TestPagesOneByOne.settings = settings(max_examples=40, deadline=None)


@settings(deadline=None)
@given(st.lists(st.integers(1, 2000), min_size=1, max_size=40))
def test_an_empty_range_takes_blocks_of_all_its_pages(blocks: list[int]) -> None:
    allocator = PageAllocator(sum(blocks))
    assert allocator.fits(blocks)
    assert allocator.allocate(blocks) is not None
    assert (allocator.free_pages, allocator.largest_free) == (0, 0)
    assert not allocator.fits([1])


def test_small_blocks_stay_away_from_large_ones() -> None:
    allocator = PageAllocator(10_000)
    assert allocator.allocate([1, 1000, 1, 1000]) == [
        [(9999, 1)],
        [(0, 1000)],
        [(9998, 1)],
        [(1000, 1000)],
    ]


def test_a_block_goes_where_the_address_is_lowest_not_where_it_fits_best() -> None:
    allocator = PageAllocator(10_000)
    ((large,), _, (small,), _) = allocator.allocate([3000, 300, 301, 302]) or []
    allocator.free(*large)
    allocator.free(*small)
    assert allocator.allocate([300]) == [[(large[0], 300)]]


def test_what_fits_nowhere_in_one_piece_is_taken_in_the_fewest() -> None:
    allocator = PageAllocator(1000)
    taken = allocator.allocate([300, 300, 300, 100]) or []
    for index in (0, 2):
        allocator.free(*taken[index][0])
    assert allocator.allocate([400]) is None
    assert not allocator.fits([300, 400], max_runs=2)
    assert allocator.allocate([400], max_runs=2) == [[(0, 300), (800, 100)]]


def test_churn_of_entries_keeps_the_whole_range_usable() -> None:
    for seed, draw in enumerate((_of_one_size, _of_all_sizes)):
        refused = sorted(_churn(random.Random(seed), draw, pages=2**19, entries=500))
        assert refused[0] > 0.99


def _churn(
    random_: random.Random, draw: _Draw, *, pages: int, entries: int
) -> list[float]:
    """Return the part of the range asked for, each time that there was no room.

    A quarter of the entries is leased and stays, whatever leaves.
    """
    allocator, refused = PageAllocator(pages), []
    inside: list[list[tuple[int, int]]] = []
    leased: list[list[tuple[int, int]]] = []
    for _ in range(entries):
        blocks = _entry(random_, draw, pages // 4)
        while (taken := allocator.allocate(blocks, max_runs=64)) is None:
            asked = pages - allocator.free_pages + sum(blocks)
            refused.append(min(1.0, asked / pages))
            too_many = len(leased) * 3 >= len(inside) and random_.random() < 0.25
            group = leased if too_many else inside
            for block in group.pop(random_.randrange(len(group))):
                allocator.free(*block)
        inside.append([run for runs in taken for run in runs])
        while len(leased) * 3 < len(inside):
            leased.append(inside.pop(random_.randrange(len(inside))))
    return refused


def _entry(random_: random.Random, draw: _Draw, max_pages: int) -> Sequence[int]:
    while True:
        blocks = draw(random_, random_.randint(2, 128))
        if sum(blocks) <= max_pages:
            return blocks


def _of_one_size(random_: random.Random, count: int) -> list[int]:
    return [_pages(random_)] * count


def _of_all_sizes(random_: random.Random, count: int) -> list[int]:
    return [_pages(random_) for _ in range(count)]


def _pages(random_: random.Random) -> int:
    nbytes = _PAGE * (_LARGEST / _PAGE) ** random_.random()
    return -(-int(nbytes) // _PAGE)


def test_large_tensors_have_blocks_of_their_own() -> None:
    assert pack([65536, 65537]) == ([16, 17], [(0, 0), (1, 0)])


def test_small_tensors_share_blocks_at_aligned_offsets() -> None:
    blocks, places = pack([1, 100_000, 100, 0])
    assert (blocks, places) == ([1, 25], [(0, 0), (1, 0), (0, 64), (0, 192)])


@settings(deadline=None)
@given(st.lists(st.integers(0, 70_000), max_size=60))
def test_no_two_tensors_overlap_and_each_is_inside_its_block(sizes: list[int]) -> None:
    blocks, places = pack(sizes)
    ends = [0] * len(blocks)
    for nbytes, (block, offset) in zip(sizes, places, strict=True):
        assert offset % 64 == 0
        assert ends[block] <= offset
        ends[block] = offset + nbytes
    assert [max(pages_of(end), 0) for end in ends] == blocks
    assert all(pages * PAGE_NBYTES <= 256 * 1024 for pages in blocks)


def test_a_block_is_as_long_as_what_is_in_it() -> None:
    assert pack([60_000] * 5)[0] == [59, 15]
    assert pack([4096, 4096, 4096]) == ([3], [(0, 0), (0, 4096), (0, 8192)])


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


@needs_slabs
def test_slabs_are_wanted_until_all_are_there(pages: SlabPages, wanted: Wanted) -> None:
    assert pages.take([_MIB]) is None
    assert wanted.times == 0
    pages.want()
    assert wanted.times == 1
    _grow(pages)
    assert pages.nbytes == pages.free_bytes == 2 * MIN_SLAB_NBYTES
    pages.want()
    assert wanted.times == 1


@needs_slabs
def test_nothing_is_wanted_of_closed_pages(pages: SlabPages, wanted: Wanted) -> None:
    pages.close()
    pages.want()
    assert wanted.times == 0


@needs_slabs
def test_what_fits_now_is_less_than_what_could_ever_fit(pages: SlabPages) -> None:
    sizes = [20 * _MIB, 12 * _MIB]
    assert pages.could_ever_fit(sizes)
    assert not pages.could_ever_fit([*sizes, 1])
    assert not pages.fits(sizes)
    _grow(pages)
    assert pages.fits(sizes)


@needs_slabs
def test_too_small_a_slab_is_the_last(pages: SlabPages) -> None:
    nbytes = pages.make_slab()
    assert nbytes == MIN_SLAB_NBYTES
    assert not pages.add_slab(nbytes - PAGE_NBYTES)
    assert not pages.is_growing
    assert not pages.could_ever_fit([MIN_SLAB_NBYTES])
    assert pages.is_usable


@needs_slabs
def test_pages_can_be_had_without_their_memory(pages: SlabPages) -> None:
    _pages_with_gaps(pages)
    (place,) = pages.take([2 * _MIB]) or []
    assert len(place[0].runs) == 2
    assert place[0].memory is None
    pages.free(place[0])
    assert pages.free_bytes == 16 * _MIB


@needs_slabs
def test_pages_outlive_no_slabs(pages: SlabPages) -> None:
    _grow(pages)
    (place,) = pages.take([_MIB]) or []
    memory = pages.memory_of(place[0], writable=False)
    assert memory.nbytes == _MIB
    pages.unmap()
    with pytest.raises(RuntimeError):
        pages.memory_of(place[0], writable=False)
    assert memory[0] == 0


@needs_slabs
@pytest.mark.parametrize("limit", ["_MAX_RUNS", "_MAX_STITCHED_RUNS"])
def test_nothing_is_in_more_pieces_than_there_may_be(
    limit: str, pages: SlabPages, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages_module, limit, 3)
    _pages_with_gaps(pages)
    (place,) = pages.take([3 * _MIB]) or []
    assert pages.take([4 * _MIB]) is None
    pages.free(place[0])
    assert pages.take([3 * _MIB]) is not None


@needs_slabs
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


@needs_slabs
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


@needs_slabs
def test_pages_that_lay_apart_are_mapped_no_longer_than_they_are_taken(
    pages: SlabPages,
) -> None:
    _pages_with_gaps(pages)
    (place,) = pages.take([2 * _MIB]) or []
    mapped = weakref.ref(pages.memory_of(place[0], writable=True))
    assert mapped() is not None
    pages.free(place[0])
    assert mapped() is None


@needs_slabs
@pytest.mark.parametrize("writable", [True, False])
def test_a_run_of_pages_is_all_of_its_bytes(writable: bool, pages: SlabPages) -> None:
    _grow(pages)
    for runs, count in (((), 0), (((1, 2),), 2), (((3, 1), (1, 1)), 2)):
        memory = pages.memory_of(Pages(runs), writable=writable)
        assert len(memory) == count * PAGE_NBYTES
