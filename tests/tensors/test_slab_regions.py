from __future__ import annotations

import gc
import threading
from collections.abc import Iterator

import pytest

from asynckv.tensors.paged_arena import SlabArena
from asynckv.tensors.slab_regions import SlabRegion
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


def test_a_hold_keeps_memory_that_nobody_looks_at(arena: CountingArena) -> None:
    region = _take(arena, _MIB)
    hold = region.hold()
    region.release()
    assert arena.pinned_bytes == _MIB
    for _ in range(2):
        hold.release()
    assert arena.used_bytes == arena.pinned_bytes == 0


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
