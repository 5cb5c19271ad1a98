from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import TypeAlias

import pytest
import torch
from hypothesis import given, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from asynckv.errors import EntryTooLarge
from asynckv.tensors.allocator import PageAllocator
from asynckv.tensors.arena import HeapArena, heap_memory, pack, pages_of
from asynckv.tensors.slabs import PAGE_NBYTES
from asynckv.tensors.views import bytes_of, tensor_over
from asynckv.types import TensorSpec

MIB = 2**20


def test_takes_all_regions_or_none() -> None:
    arena = HeapArena(10)
    assert arena.allocate([6, 5]) is None
    assert arena.used_bytes == 0
    regions = arena.allocate([6, 4])
    assert regions is not None
    assert [region.nbytes for region in regions] == [6, 4]
    assert (arena.used_bytes, arena.peak_bytes) == (10, 10)


def test_a_region_is_given_back_once() -> None:
    arena = HeapArena(10)
    (region,) = arena.allocate([10]) or []
    for _ in range(2):
        region.release()
    assert arena.used_bytes == 0
    assert arena.peak_bytes == 10


def test_memory_lives_as_long_as_its_tensor() -> None:
    arena = HeapArena(16)
    (region,) = arena.allocate([8]) or []
    tensor = region.tensor(TensorSpec((2,), "float32"))
    tensor.copy_(torch.tensor([1.0, 2.0]))
    region.release()
    del region
    assert tensor.tolist() == [1.0, 2.0]


def test_a_view_and_a_tensor_are_the_same_bytes() -> None:
    (region,) = HeapArena(8).allocate([8]) or []
    region.view()[:] = bytes(range(8))
    assert region.tensor(TensorSpec((8,), "uint8")).tolist() == list(range(8))


def test_what_is_outside_is_charged_when_it_is_adopted() -> None:
    arena = HeapArena(10)
    regions = arena.allocate_outside([8])
    assert arena.used_bytes == 0
    (other,) = arena.allocate([3]) or []
    assert not arena.adopt(regions)
    other.release()
    assert arena.adopt(regions)
    assert arena.used_bytes == 8
    regions[0].release()
    assert arena.used_bytes == 0


def test_says_what_could_ever_fit() -> None:
    arena = HeapArena(10)
    arena.allocate([10])
    assert not arena.fits([1])
    assert arena.could_ever_fit([10])
    assert not arena.could_ever_fit([10, 1])


@pytest.mark.parametrize("nbytes", [4097, 16 * 1024, 64 * 1024, MIB + 1])
def test_memory_of_the_heap_begins_at_a_multiple_of_64(nbytes: int) -> None:
    kept = [heap_memory(nbytes) for _ in range(8)]
    tensors = [tensor_over(x, TensorSpec((nbytes,), "uint8")) for x in kept]
    assert {tensor.data_ptr() % 64 for tensor in tensors} == {0}
    assert {memory.nbytes for memory in kept} == {nbytes}
    assert not any(memory.readonly for memory in kept)


def test_empty_tensors_take_no_room() -> None:
    arena = HeapArena(0)
    (region,) = arena.allocate([0]) or []
    assert region.tensor(TensorSpec((0, 3), "int16")).shape == (0, 3)


def test_regions_of_any_size_hold_tensors_of_any_dtype() -> None:
    arena = HeapArena(2**20)
    for count in (1, 256, 4096):
        (region,) = arena.allocate([16 * count]) or []
        tensor = region.tensor(TensorSpec((count,), "complex128"))
        tensor.fill_(1j)
        assert bytes(region.view()) == bytes_of(tensor)


def test_many_regions_are_freed_at_once_and_only_once() -> None:
    arena = HeapArena(10)
    regions = arena.allocate([6, 4]) or []
    regions[0].release()
    arena.free(regions)
    arena.free(regions)
    assert arena.used_bytes == 0


def test_a_region_that_is_held_is_given_back_when_the_last_hold_ends() -> None:
    arena = HeapArena(10)
    (region,) = arena.allocate([10]) or []
    holds = [region.hold(), region.hold()]
    region.release()
    assert not arena.fits([1])
    for _ in range(2):
        holds[0].release()
    assert arena.used_bytes == 10
    holds[1].release()
    assert arena.used_bytes == 0


def test_a_hold_that_ends_before_the_release_keeps_nothing() -> None:
    arena = HeapArena(10)
    (region,) = arena.allocate([10]) or []
    region.hold().release()
    assert arena.used_bytes == 10
    region.release()
    assert arena.used_bytes == 0


def test_an_arena_of_the_heap_has_all_its_room_from_the_start() -> None:
    assert not HeapArena(10).is_growing


def test_memory_that_the_process_cannot_have_is_an_entry_too_large() -> None:
    arena = HeapArena(2**49)
    (region,) = arena.allocate([2**48]) or []
    with pytest.raises(EntryTooLarge, match=f"no memory for {2**48} bytes"):
        region.view()


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
