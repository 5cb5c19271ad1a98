"""A region is to a tier what it is to everybody: the same bytes, in order."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator

import pytest

from asynckv.stores.tier_stack import tier_memory
from asynckv.tensors.arena import HeapArena, Region
from asynckv.tensors.paged_arena import SlabArena

_MIB = 2**20


@pytest.mark.parametrize("nbytes", [0, 1, 4096, 300_000])
def test_what_is_written_by_pieces_is_in_the_region(nbytes: int) -> None:
    (region,) = HeapArena(2**20).allocate_outside([nbytes])
    memory, data = tier_memory(region), bytes(range(256)) * 1200
    start = 0
    for piece in memory.pieces:
        piece[:] = data[start : start + len(piece)]
        start += len(piece)
    assert start == memory.nbytes == nbytes
    assert bytes(region.read() or b"") == data[:nbytes]


class Slabs:
    """An arena of 4 MiB, all of it there."""

    def __init__(self) -> None:
        self.arena = SlabArena(4 * _MIB, wanted=lambda: None, freed=lambda: None)
        self.arena.add_slab(self.arena.pages.make_slab())

    def take(self, *sizes: int) -> list[Region]:
        return self.arena.allocate(sizes) or []


@pytest.fixture
def slabs() -> Iterator[Slabs]:
    slabs = Slabs()
    yield slabs
    slabs.arena.close()
    del slabs.arena
    gc.collect()


def _addresses(pages: object) -> list[int]:
    assert isinstance(pages, list)
    return [ctypes.addressof(ctypes.c_char.from_buffer(page)) for page in pages]


def test_a_region_with_pages_of_its_own_is_shown_to_their_end(
    slabs: Slabs,
) -> None:
    (region,) = slabs.take(70_001)
    memory = tier_memory(region)
    assert [page.nbytes for page in memory.pages] == [18 * 4096]
    assert [address % 4096 for address in _addresses(memory.pages)] == [0]
    memory.pages[0][:70_001] = bytes(70_000) + b"x"
    assert region.read() == memory.pieces[0] == memory.pages[0][:70_001]


def test_pages_may_lie_apart(slabs: Slabs) -> None:
    regions = slabs.take(*[_MIB] * 4)
    slabs.arena.free(regions[::2])
    (apart,) = slabs.take(2 * _MIB - 1)
    memory = tier_memory(apart)
    assert [page.nbytes for page in memory.pages] == [_MIB, _MIB]
    assert [piece.nbytes for piece in memory.pieces] == [_MIB, _MIB - 1]
    assert [address % 4096 for address in _addresses(memory.pages)] == [0, 0]


def test_what_shares_its_pages_has_none(slabs: Slabs) -> None:
    small, _ = slabs.take(5000, 5000)
    assert not tier_memory(small).pages


def test_what_was_released_has_none(slabs: Slabs) -> None:
    (region,) = slabs.take(_MIB)
    region.release()
    assert not tier_memory(region).pages


def test_a_hold_on_the_pages_keeps_the_region(slabs: Slabs) -> None:
    (region,) = slabs.take(4 * _MIB)
    memory = tier_memory(region)
    region.release()
    assert not slabs.take(_MIB)
    del memory
    slabs.arena.collect()
    assert slabs.take(_MIB)
