from __future__ import annotations

import gc
import threading
from collections.abc import Iterator

import pytest

from asynckv.tensors.paged_arena import SlabArena, SlabRegion
from asynckv.tensors.slabs import has_slabs
from asynckv.types import TensorSpec

pytestmark = pytest.mark.skipif(not has_slabs(), reason="no memory files here")


_MIB = 2**20
_LARGE = TensorSpec((_MIB,), "uint8")


class CountingArena(SlabArena):
    """One slab, and how often it said that memory may have become free."""

    def __init__(self) -> None:
        self.freed = 0
        super().__init__(16 * _MIB, wanted=lambda: None, freed=self._count)
        self.add_slab(self.pages.make_slab())

    def _count(self) -> None:
        self.freed += 1


@pytest.fixture
def arena() -> Iterator[CountingArena]:
    arena = CountingArena()
    yield arena
    arena.close()
    gc.collect()


def _take(arena: SlabArena, nbytes: int) -> SlabRegion:
    (region,) = arena.allocate([nbytes]) or []
    assert isinstance(region, SlabRegion)
    return region


def test_memory_without_a_view_is_free_at_once(arena: CountingArena) -> None:
    region = _take(arena, _MIB)
    region.view()
    region.release()
    region.release()
    assert arena.used_bytes == 0
    assert arena.freed == 0


def test_a_view_may_die_in_another_thread(arena: CountingArena) -> None:
    region = _take(arena, _MIB)
    views = [region.view()]
    region.release()
    thread = threading.Thread(target=views.clear)
    thread.start()
    thread.join()
    assert arena.freed == 1
    assert arena.fits([_MIB])
    assert arena.used_bytes == 0


def test_a_released_region_shows_scratch_memory(arena: CountingArena) -> None:
    region = _take(arena, _MIB)
    region.view()[0] = 7
    region.release()
    other = _take(arena, _MIB)
    region.view()[0] = 9
    assert other.view()[0] == 7
    assert other.generation != region.generation
    other.release()


def test_constant_tensors_show_what_is_there_and_hold_it(arena: CountingArena) -> None:
    region = _take(arena, _MIB)
    region.view()[3] = 5
    constant = region.constant(_LARGE)
    assert constant[3] == 5
    region.release()
    assert arena.pinned_bytes == _MIB
    del constant
    arena.collect()
    assert arena.used_bytes == 0
    with pytest.raises(RuntimeError):
        region.constant(_LARGE)


def test_memory_changes_hands_only_while_nobody_has_a_view(
    arena: CountingArena,
) -> None:
    region = _take(arena, _MIB)
    view = region.view()
    assert not region.can_change_hands()
    del view
    assert region.can_change_hands()
    tensor = region.tensor(_LARGE)
    region.hand_out()
    region.release()
    assert not region.can_change_hands()
    assert (arena.pinned_bytes, arena.handed_out_bytes) == (0, _MIB)
    del tensor
    arena.collect()
    assert arena.used_bytes == arena.handed_out_bytes == 0


def test_a_region_is_charged_to_no_other_arena(arena: CountingArena) -> None:
    region = _take(arena, _MIB)
    with pytest.raises(RuntimeError):
        region.charge_to(arena)
    region.release()


def test_a_peers_hold_ends_once(arena: CountingArena) -> None:
    region = _take(arena, _MIB)
    first, second = region.hold(), region.hold()
    assert not region.can_change_hands()
    region.release()
    for _ in range(2):
        first.release()
    assert arena.pinned_bytes == _MIB
    second.release()
    assert arena.pinned_bytes == arena.used_bytes == 0


def test_a_release_that_is_not_over_can_be_undone_once(arena: CountingArena) -> None:
    region = _take(arena, _MIB)
    assert not region.own()
    hold = region.hold()
    region.release()
    assert arena.pinned_bytes == _MIB
    assert region.own() and not region.own()
    assert (arena.pinned_bytes, arena.used_bytes) == (0, _MIB)
    hold.release()
    assert arena.used_bytes == _MIB
    region.release()
    assert arena.used_bytes == 0 and not region.own()


def test_bytes_are_used_or_pinned_or_handed_out(arena: SlabArena) -> None:
    regions = [_take(arena, n * _MIB) for n in (1, 2, 4)]
    views = [region.view() for region in regions]
    regions[1].release()
    assert (arena.used_bytes, arena.pinned_bytes) == (5 * _MIB, 2 * _MIB)
    regions[2].hand_out()
    regions[2].release()
    assert (arena.used_bytes, arena.pinned_bytes) == (_MIB, 2 * _MIB)
    assert arena.handed_out_bytes == 4 * _MIB
    regions[0].release()
    views.clear()
    arena.collect()
    assert arena.used_bytes == arena.pinned_bytes == arena.handed_out_bytes == 0


@pytest.mark.parametrize("is_handed_out", [False, True])
def test_memory_kept_for_a_child_is_never_used_again_and_counts_no_more(
    is_handed_out: bool, arena: SlabArena
) -> None:
    region = _take(arena, 10 * _MIB)
    view = region.view()
    if is_handed_out:
        region.hand_out()
    region.release()
    arena.keep_for_child()
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
    arena.keep_for_child()
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
    arena.keep_for_child()
    hold.release()
    hold.release()
    assert arena.pinned_bytes == arena.handed_out_bytes == 0


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
    arena.keep_for_child()
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
