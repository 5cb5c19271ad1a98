from __future__ import annotations

from collections.abc import Iterator

import pytest

from asynckv.tensors.paged_arena import PagedArena
from asynckv.tensors.slab_arena import SlabArena
from asynckv.tensors.slabs import has_slabs

MIB = 2**20

pytestmark = pytest.mark.skipif(not has_slabs(), reason="no memory files here")


@pytest.fixture
def arena() -> Iterator[PagedArena]:
    arena = SlabArena(8 * MIB, wanted=lambda: None, freed=lambda: None)
    yield arena
    arena.close()


def test_large_entries_wait_for_pages_and_small_ones_do_not(arena: PagedArena) -> None:
    small = arena.allocate([64])
    assert small is not None and arena.allocate([MIB]) is None
    arena.add_slab(arena.pages.make_slab())
    large = arena.allocate([MIB])
    assert large is not None and large[0].pages is not None
    arena.free([*small, *large])


def test_where_there_is_no_memory_at_all_regions_are_on_the_heap(
    arena: PagedArena,
) -> None:
    arena.pages.is_usable = False
    regions = arena.allocate([MIB])
    assert regions is not None and regions[0].pages is None
    arena.free(regions)
    assert not arena.used_bytes


def test_too_little_memory_lowers_the_bound(arena: PagedArena) -> None:
    arena.pages.add_slab = lambda nbytes: False  # type: ignore[method-assign]
    arena.add_slab(4 * MIB)
    assert arena.refused_slabs == 1 and arena.max_bytes == 4 * MIB


def test_tokens_count_and_need_no_pages(arena: PagedArena) -> None:
    regions = arena.allocate([], [8, 8])
    assert regions is not None and arena.used_bytes == 16
    arena.free(regions)
    assert not arena.used_bytes
