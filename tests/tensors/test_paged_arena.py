from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

from asynckv.tensors.paged_arena import IdlePages, PagedArena, SlabArena
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


def test_a_block_of_pages_is_free_when_its_last_region_is(arena: PagedArena) -> None:
    arena.add_slab(arena.pages.make_slab())
    regions = arena.allocate([100, 200, MIB]) or []
    assert regions[0].pages is regions[1].pages is not None
    regions[0].view()[:] = b"x" * 100
    regions[1].release()
    assert bytes(regions[0].view()) == b"x" * 100
    for region in regions:
        region.release()
    assert arena.used_bytes == 0
    (all_of_it,) = arena.allocate([8 * MIB]) or []
    assert all_of_it.pages is not None
    all_of_it.release()


def test_what_could_never_fit_is_known_with_its_charges(arena: PagedArena) -> None:
    assert arena.could_ever_fit([8 * MIB]) and arena.could_ever_fit([64], [64])
    assert not arena.could_ever_fit([8 * MIB], [1])
    assert not arena.could_ever_fit([], [8 * MIB + 1])


def test_idle_memory_is_handed_over_once_when_the_arena_is_closed() -> None:
    idle: list[IdlePages] = []
    for slabs in (0, 1):
        arena = SlabArena(
            8 * MIB, wanted=lambda: None, freed=lambda: None, unmapped=idle.append
        )
        if slabs:
            arena.add_slab(arena.pages.make_slab())
        arena.close()
        arena.close()
        assert len(idle) == slabs


def test_what_is_pinned_is_unmapped_with_its_last_view_once_it_is_closed() -> None:
    before, idle = _mappings(), list[IdlePages]()
    arena = SlabArena(
        8 * MIB, wanted=lambda: None, freed=lambda: None, unmapped=idle.append
    )
    arena.add_slab(arena.pages.make_slab())
    regions = arena.allocate([MIB] * 8) or []
    regions.sort(key=lambda region: region.pages.runs[0] if region.pages else (0, 0))
    arena.free(regions[::2])
    (apart,) = arena.allocate([2 * MIB]) or []
    view = apart.view()
    arena.free([*regions[1::2], apart])
    arena.close()
    idle.pop().drop()
    assert _mappings() > before
    del view
    gc.collect()
    assert _mappings() == before


def _mappings() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:asynckv")
