from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from asynckv.tensors.paged_arena import SlabArena
from asynckv.tensors.slab_regions import SlabRegion
from asynckv.tensors.slabs import has_slabs

pytestmark = pytest.mark.skipif(not has_slabs(), reason="no memory files here")

_MIB = 2**20


@pytest.fixture
def arena() -> Iterator[SlabArena]:
    arena = SlabArena(16 * _MIB, wanted=lambda: None, freed=lambda: None)
    arena.add_slab(arena.pages.make_slab())
    yield arena
    arena.close()
    gc.collect()


def _take(arena: SlabArena, nbytes: int) -> SlabRegion:
    (region,) = arena.allocate([nbytes]) or []
    assert isinstance(region, SlabRegion)
    return region


def test_bytes_are_used_or_pinned_or_handed_out(arena: SlabArena) -> None:
    regions = [_take(arena, n * _MIB) for n in (1, 2, 4)]
    views = [region.view() for region in regions]
    pins = arena.pins
    regions[1].release()
    assert (arena.used_bytes, pins.pinned_bytes) == (5 * _MIB, 2 * _MIB)
    regions[2].hand_out()
    regions[2].release()
    assert (arena.used_bytes, pins.pinned_bytes) == (_MIB, 2 * _MIB)
    assert pins.handed_out_bytes == 4 * _MIB
    regions[0].release()
    views.clear()
    pins.collect()
    assert arena.used_bytes == pins.pinned_bytes == pins.handed_out_bytes == 0


@pytest.mark.parametrize("is_handed_out", [False, True])
def test_memory_kept_for_a_child_is_never_used_again_and_counts_no_more(
    is_handed_out: bool, arena: SlabArena
) -> None:
    region = _take(arena, 10 * _MIB)
    view = region.view()
    if is_handed_out:
        region.hand_out()
    region.release()
    arena.pins.keep_for_child()
    assert arena.pinned_bytes == (0 if is_handed_out else 10 * _MIB)
    del view
    arena.collect()
    assert (arena.used_bytes, arena.pinned_bytes) == (0, 0)
    assert arena.handed_out_bytes == 10 * _MIB
    (other,) = arena.allocate([10 * _MIB]) or []
    assert not other.is_shared
    other.release()


def test_memory_that_nobody_has_a_view_of_is_not_kept(arena: SlabArena) -> None:
    region = _take(arena, 10 * _MIB)
    arena.pins.keep_for_child()
    region.release()
    region = _take(arena, 16 * _MIB)
    region.release()


def test_memory_that_only_a_peer_holds_is_not_kept_for_a_child(
    arena: SlabArena,
) -> None:
    region = _take(arena, 10 * _MIB)
    hold = region.hold()
    region.release()
    assert arena.pinned_bytes == 10 * _MIB
    arena.pins.keep_for_child()
    hold.release()
    hold.release()
    assert arena.pinned_bytes == arena.handed_out_bytes == 0


def test_memory_stays_pinned_until_the_last_peer_has_let_it_go(
    arena: SlabArena,
) -> None:
    region = _take(arena, 10 * _MIB)
    holds = [region.hold() for _ in range(2)]
    assert not region.can_change_hands()
    region.release()
    holds.pop().release()
    assert arena.pinned_bytes == 10 * _MIB
    holds.pop().release()
    assert arena.pinned_bytes == 0


def test_a_region_is_all_of_its_bytes_and_none_of_the_next(arena: SlabArena) -> None:
    regions = arena.allocate([100, 200, _MIB]) or []
    assert [len(region.view()) for region in regions] == [100, 200, _MIB]
    for number, region in enumerate(regions):
        region.view()[:] = bytes([number]) * region.nbytes
    for number, region in enumerate(regions):
        assert bytes(region.view()) == bytes([number]) * region.nbytes
        region.release()


def test_what_was_pinned_once_is_kept_for_no_child_later(arena: SlabArena) -> None:
    region = _take(arena, _MIB)
    hold = region.hold()
    region.release()
    hold.release()
    (again,) = arena.allocate([_MIB]) or []
    view = again.view()
    arena.pins.keep_for_child()
    del view
    again.release()
    assert arena.used_bytes == arena.handed_out_bytes == 0


def test_what_has_an_owner_again_is_not_pinned_and_counts_once(
    arena: SlabArena,
) -> None:
    region = _take(arena, _MIB)
    view = region.view()
    region.release()
    assert region.own()
    assert (arena.used_bytes, arena.pinned_bytes) == (_MIB, 0)
    del view
    region.release()
    assert (arena.used_bytes, arena.pinned_bytes) == (0, 0)
