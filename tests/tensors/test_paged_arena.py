from __future__ import annotations

import errno
import gc
import os
import random
import resource
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy
import pytest
import torch
from hypothesis import given, settings, strategies as st

from asynckv.tensors import paged_arena as paged_arena_module
from asynckv.tensors.arena import Region
from asynckv.tensors.paged_arena import PagedArena, SlabArena, SlabRegion
from asynckv.tensors.pages import IdlePages
from asynckv.tensors.runs import pieces_of
from asynckv.tensors.slabs import MIN_SLAB_NBYTES, PAGE_NBYTES, has_slabs
from asynckv.types import TensorSpec

pytestmark = pytest.mark.skipif(not has_slabs(), reason="no memory files here")


_MIB = 2**20


@pytest.fixture
def arena() -> Iterator[PagedArena]:
    arena = SlabArena(8 * _MIB, wanted=lambda: None, freed=lambda: None)
    yield arena
    arena.close()


def test_tokens_count_and_need_no_pages(arena: PagedArena) -> None:
    regions = arena.allocate([], 16)
    assert regions == [] and arena.used_bytes == 16
    arena.free(regions, 16)
    assert not arena.used_bytes


def test_what_could_never_fit_is_known_with_its_charges(arena: PagedArena) -> None:
    assert arena.could_ever_fit([8 * _MIB]) and arena.could_ever_fit([64], 64)
    assert not arena.could_ever_fit([8 * _MIB], 1)
    assert not arena.could_ever_fit([], 8 * _MIB + 1)


def test_idle_memory_is_handed_over_once_when_the_arena_is_closed() -> None:
    idle: list[IdlePages] = []
    for slabs in (0, 1):
        arena = SlabArena(
            8 * _MIB, wanted=lambda: None, freed=lambda: None, unmapped=idle.append
        )
        if slabs:
            arena.add_slab(arena.pages.make_slab())
        arena.close()
        arena.close()
        assert len(idle) == slabs


def test_what_is_pinned_is_unmapped_with_its_last_view_once_it_is_closed() -> None:
    before, idle = _mappings(), list[IdlePages]()
    arena = SlabArena(
        8 * _MIB, wanted=lambda: None, freed=lambda: None, unmapped=idle.append
    )
    arena.add_slab(arena.pages.make_slab())
    regions = arena.allocate([_MIB] * 8) or []
    regions.sort(key=lambda region: region.pages.runs[0] if region.pages else (0, 0))
    arena.free(regions[::2])
    (apart,) = arena.allocate([2 * _MIB]) or []
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


_LARGE = TensorSpec((_MIB,), "uint8")


class Bench:
    """An arena whose slabs come when the test says so."""

    def __init__(self, max_bytes: int) -> None:
        self.wanted = 0
        self.freed = 0
        self.arena = SlabArena(max_bytes, wanted=self._want, freed=self._free)

    def _want(self) -> None:
        self.wanted += 1

    def _free(self) -> None:
        self.freed += 1

    def grow(self) -> None:
        self.arena.add_slab(self.arena.pages.make_slab())

    def take(self, *sizes: int) -> list[SlabRegion]:
        while (regions := self.arena.allocate(sizes)) is None:
            assert self.arena.is_growing
            self.grow()
        return [region for region in regions if isinstance(region, SlabRegion)]


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench(64 * _MIB)
    yield bench
    bench.arena.close()
    del bench.arena
    gc.collect()


def test_a_slab_is_asked_for_and_then_there_is_room(bench: Bench) -> None:
    assert bench.arena.allocate([_MIB]) is None
    assert bench.wanted == 1
    assert bench.arena.could_ever_fit([_MIB])
    assert not bench.arena.fits([_MIB])
    bench.grow()
    assert bench.arena.fits([_MIB])
    (region,) = bench.arena.allocate([_MIB]) or []
    assert region.is_shared
    assert bench.wanted == 1


def test_what_rides_with_its_frame_is_on_the_heap_and_counted(bench: Bench) -> None:
    (region,) = bench.arena.allocate([64 * 1024], 24) or []
    assert not region.is_shared
    assert bench.arena.used_bytes == 64 * 1024 + 24
    bench.arena.free([region], 24)
    assert bench.arena.used_bytes == 0


def test_small_entries_beyond_their_share_are_in_the_slabs(bench: Bench) -> None:
    for _ in range(64):
        assert bench.arena.allocate([64 * 1024]) is not None
    (region,) = bench.take(64 * 1024)
    assert region.is_shared


def test_small_tensors_of_one_entry_share_pages(bench: Bench) -> None:
    sizes = [5000] * 20 + [_MIB + 1]
    regions = bench.take(*sizes)
    offsets = [region.offset for region in regions]
    assert all(offset % 64 == 0 for offset in offsets)
    assert offsets[-1] % PAGE_NBYTES == 0
    free = bench.arena.pages.free_bytes
    for region in regions[:20]:
        assert bench.arena.pages.free_bytes == free
        region.release()
    pages = -(-5056 * 20 // PAGE_NBYTES)
    assert bench.arena.pages.free_bytes == free + pages * PAGE_NBYTES


def test_an_entry_of_all_bytes_fits_also_when_larger_than_a_slab(bench: Bench) -> None:
    (region,) = bench.take(64 * _MIB)
    assert region.view().nbytes == 64 * _MIB
    assert not bench.arena.is_growing
    assert not bench.arena.could_ever_fit([64 * _MIB, 1])


def test_memory_is_not_reused_while_a_view_lives(bench: Bench) -> None:
    (region,) = bench.take(48 * _MIB)
    tensor = region.tensor(TensorSpec((48 * _MIB,), "uint8"))
    part = tensor[:4].view(torch.int32)
    region.release()
    del tensor
    assert not bench.arena.fits([48 * _MIB])
    assert (bench.arena.pinned_bytes, bench.arena.used_bytes) == (48 * _MIB, 0)
    del part
    assert bench.freed == 1
    bench.arena.collect()
    assert bench.arena.pinned_bytes == bench.arena.used_bytes == 0
    assert bench.arena.fits([48 * _MIB])


def test_what_came_from_outside_is_charged_pages_too(bench: Bench) -> None:
    regions = bench.arena.allocate_outside([40 * _MIB])
    while not bench.arena.adopt(regions, 16):
        bench.grow()
    assert bench.arena.used_bytes == 40 * _MIB + 16
    assert not regions[0].is_shared
    assert not bench.arena.fits([40 * _MIB])
    bench.arena.free(regions, 16)
    assert bench.arena.used_bytes == 0
    bench.take(40 * _MIB)


def test_less_memory_lowers_the_bound_and_says_so_once(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bench.take(_MIB)

    def refuse(fd: int, start: int, count: int) -> None:
        raise OSError(errno.ENOSPC, "no memory")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    bench.grow()
    assert bench.arena.max_bytes == MIN_SLAB_NBYTES
    assert not bench.arena.is_growing
    assert not bench.arena.could_ever_fit([20 * _MIB])
    assert bench.arena.could_ever_fit([MIN_SLAB_NBYTES])
    assert bench.arena.refused_slabs == len(caplog.records) == 1


def test_without_shared_memory_everything_is_on_the_heap(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(name: str, flags: int) -> int:
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr(os, "memfd_create", refuse)
    bench.grow()
    (region,) = bench.arena.allocate([64 * _MIB]) or []
    assert not region.is_shared
    assert bench.arena.max_bytes == 64 * _MIB
    assert bench.arena.refused_slabs == len(caplog.records) == 1


def test_slabs_are_unmapped_when_the_last_view_is_gone(bench: Bench) -> None:
    gc.collect()  # what others left
    mappings = _mappings()
    (region,) = bench.take(_MIB)
    tensor = region.tensor(_LARGE)
    bench.arena.close()
    region.release()
    tensor.fill_(3)
    assert _mappings() == mappings + 1
    del tensor
    bench.arena.collect()
    assert _mappings() == mappings


def _faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def test_a_slab_that_comes_too_late_is_let_go(bench: Bench) -> None:
    nbytes = bench.arena.pages.make_slab()
    bench.arena.close()
    bench.arena.add_slab(nbytes)
    assert bench.arena.pages.nbytes == 0
    assert bench.arena.allocate([_MIB]) is None
    assert bench.wanted == 0


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32), st.booleans())
def test_no_view_ever_changes_under_its_reader(seed: int, threaded: bool) -> None:
    random_, bench = random.Random(seed), Bench(32 * _MIB)
    inside: list[tuple[list[Region], int]] = []
    kept: list[tuple[memoryview, int]] = []
    for mark in range(1, 120):
        sizes = [random_.choice((3000, 70_000, _MIB)) for _ in range(4)]
        while (regions := bench.arena.allocate(sizes)) is None:
            if bench.arena.is_growing:
                bench.grow()
            elif inside:
                bench.arena.free(inside.pop(random_.randrange(len(inside)))[0])
            else:
                _release(kept, threaded=threaded)
        for region in regions:
            region.view()[:8] = bytes([mark % 256] * 8)
        if random_.random() < 0.5:
            kept.append((random_.choice(regions).view(), mark % 256))
        inside.append((regions, mark % 256))
        for view, expected in kept:
            assert bytes(view[:8]) == bytes([expected] * 8)
    bench.arena.free([r for regions, _ in inside for r in regions])
    inside.clear()
    _release(kept, threaded=threaded, count=len(kept))
    del view, region, regions
    bench.arena.collect()
    assert bench.arena.used_bytes == bench.arena.pinned_bytes == 0
    assert bench.arena.pages.free_bytes == bench.arena.pages.nbytes


def _release(
    kept: list[tuple[memoryview, int]], *, threaded: bool, count: int = 1
) -> None:
    if threaded:
        thread = threading.Thread(target=lambda: kept.__delitem__(slice(count)))
        thread.start()
        thread.join()
    else:
        del kept[:count]


def test_memory_handed_out_does_not_count_but_is_nobody_elses(bench: Bench) -> None:
    (region,) = bench.take(48 * _MIB)
    tensor = region.tensor(_LARGE).fill_(7)
    region.hand_out()
    region.release()
    arena = bench.arena
    assert (arena.used_bytes, arena.pinned_bytes) == (0, 0)
    assert arena.handed_out_bytes == 48 * _MIB
    bench.take(16 * _MIB)[0].view()[:] = bytes(16 * _MIB)
    assert arena.fits([48 * _MIB])
    assert bool((tensor == 7).all())


def test_what_has_no_place_beside_memory_handed_out_is_on_the_heap(
    bench: Bench,
) -> None:
    (region,) = bench.take(48 * _MIB)
    tensor = region.tensor(_LARGE)
    region.hand_out()
    region.release()
    bench.grow()
    (spilled,) = bench.arena.allocate([64 * _MIB]) or []
    assert not spilled.is_shared
    assert bench.arena.allocate([1]) is None
    spilled.release()
    outside = bench.arena.allocate_outside([64 * _MIB])
    assert bench.arena.adopt(outside)
    bench.arena.free(outside)
    del tensor
    (region,) = bench.take(64 * _MIB)
    assert bench.arena.handed_out_bytes == 0


def test_the_slabs_grow_before_anything_is_on_the_heap(bench: Bench) -> None:
    (region,) = bench.take(10 * _MIB)
    tensor = region.tensor(_LARGE)
    region.hand_out()
    region.release()
    wanted = bench.wanted
    assert bench.arena.allocate([20 * _MIB]) is None
    assert bench.wanted == wanted + 1
    assert not bench.arena.adopt(bench.arena.allocate_outside([20 * _MIB]))
    assert bench.wanted == wanted + 2
    del tensor


def test_spare_memory_is_what_lies_idle(bench: Bench) -> None:
    assert bench.arena.take_spares([64 * 1024]) is None
    assert bench.wanted == 0
    assert bench.arena.take_spares([_MIB]) is None
    assert bench.wanted == 1
    bench.grow()
    (region,) = bench.arena.take_spares([_MIB]) or []
    assert region.is_shared
    bench.arena.close()
    assert bench.arena.take_spares([_MIB]) is None
    assert bench.wanted == 1


def test_the_heaps_share_is_a_sixteenth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged_arena_module, "_HEAP_LEAST_NBYTES", 0)
    bench = Bench(16 * 128 * 1024)
    taken = [bench.arena.allocate([64 * 1024]) for _ in range(3)]
    assert [regions is None for regions in taken] == [False, False, True]


def _with_gaps(bench: Bench) -> list[SlabRegion]:
    """Let every second MiB of the whole arena be free; return the others."""
    regions = bench.take(*[_MIB] * 64)
    regions.sort(key=lambda region: region.tensor(_LARGE).data_ptr())
    for mark, region in enumerate(regions):
        region.view()[:] = bytes([mark]) * _MIB
    for region in regions[::2]:
        region.release()
    return regions[1::2]


def test_what_fits_nowhere_in_one_piece_is_in_several(bench: Bench) -> None:
    others, mappings = _with_gaps(bench), _mappings()
    (region,) = bench.take(24 * _MIB)
    assert _mappings() == mappings
    tensor = region.tensor(TensorSpec((24, _MIB), "uint8"))
    assert _mappings() == mappings + 24
    tensor.copy_(torch.arange(100, 124, dtype=torch.uint8).unsqueeze(1))
    assert [bytes(other.view()[::4096]) for other in others] == [
        bytes([mark]) * 256 for mark in range(1, 64, 2)
    ]
    constant = region.constant(TensorSpec((24, _MIB), "uint8"))
    assert constant[:, -1].tolist() == list(range(100, 124))
    region.release()
    assert bench.arena.pinned_bytes == 24 * _MIB
    del tensor, constant
    bench.arena.collect()
    assert _mappings() == mappings
    assert bench.arena.pages.free_bytes == 32 * _MIB


def test_bytes_are_moved_where_they_lie_without_a_mapping_or_a_fault(
    bench: Bench,
) -> None:
    others, mappings = _with_gaps(bench), _mappings()
    (region,) = bench.take(24 * _MIB)
    before = _faults()
    for piece in pieces_of(region.memory(), 0, 24 * _MIB):
        numpy.frombuffer(piece, numpy.uint8)[:] = 77
    assert _faults() - before < 24 * _MIB // PAGE_NBYTES // 20
    assert _mappings() == mappings
    assert region.view() == bytes([77]) * 24 * _MIB
    assert [other.view()[-1] for other in others] == list(range(1, 64, 2))


def test_bytes_that_lie_apart_are_kept_while_somebody_moves_them(bench: Bench) -> None:
    others = _with_gaps(bench)
    (region,) = bench.take(2 * _MIB)
    memory = [region.memory()]
    region.release()
    assert bench.arena.pinned_bytes == 2 * _MIB
    assert isinstance(region.memory(), memoryview)  # scratch: it is released
    memory.clear()
    bench.arena.collect()
    assert bench.arena.pinned_bytes == 0
    assert len(others) == 32


def test_pieces_outlive_their_arena_with_the_last_view(bench: Bench) -> None:
    gc.collect()  # what others left
    before, others = _mappings(), _with_gaps(bench)
    (region,) = bench.take(8 * _MIB)
    view = region.view()
    bench.arena.close()
    bench.arena.free([region, *others])
    view[:] = bytes(8 * _MIB)
    del view
    bench.arena.collect()
    assert _mappings() == before
