"""Regions in shared memory that grows, beside few small ones on the heap.

Rule of this file: everything but :meth:`SlabArena.make_slab` and the finalizers runs
on one thread, and nothing waits.
"""

from __future__ import annotations

import collections
import itertools
import logging
from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

import numpy
import numpy.typing

from asynckv.tensors.allocator import PageAllocator
from asynckv.tensors.arena import Arena, Pages, Region
from asynckv.tensors.packing import pack, pages_of
from asynckv.tensors.slab_regions import SlabRegion
from asynckv.tensors.slabs import PAGE_NBYTES, Slabs, next_slab_nbytes

__all__ = ("SlabArena",)

logger = logging.getLogger(__name__)

_HEAP_NBYTES: Final = 64 * 1024
"""Entries of as few bytes ride with their frames on every path: nobody maps them."""

_HEAP_SHARE: Final = 16
_HEAP_LEAST_NBYTES: Final = 4 * 2**20
"""They stay on the heap up to a 16th of the bound, or 4 MiB: it comes on top."""

_MAX_RUNS: Final = 64
_MAX_STITCHED_RUNS: Final = 8192
"""Places that one block may be in, and those that are mapped for such blocks: a
process may have 65,530 mappings."""

_Bytes: TypeAlias = numpy.typing.NDArray[numpy.uint8]


class SlabArena(Arena):
    """Regions in slabs that are allocated as they are needed, up to ``max_bytes``.

    ``wanted`` is called when a slab is needed: :meth:`make_slab`, in a thread, then
    :meth:`add_slab` are to follow. ``freed`` is called, in any thread, when memory
    may have become free otherwise than by a call here: :meth:`collect` is to follow.

    A slab that cannot be had lowers ``max_bytes``; where there is no shared memory
    at all, regions are on the heap.

    What fits nowhere in one piece, once all slabs are there, is mapped in several.

    Memory that was handed out is the application's: it counts no more, but its pages
    are nobody else's while a view lives. What has no place because of it is on the
    heap, so that nothing waits for the application to forget what it took.
    """

    def __init__(
        self,
        max_bytes: int,
        *,
        wanted: Callable[[], None],
        freed: Callable[[], None],
    ) -> None:
        super().__init__(max_bytes)
        self._wanted = wanted
        self._freed = freed
        self._pages = PageAllocator()
        self._max_pages = pages_of(max_bytes)
        self._max_heap_bytes = max(max_bytes // _HEAP_SHARE, _HEAP_LEAST_NBYTES)
        self._heap_bytes = 0
        self._stitched_runs = 0
        self._has_slabs = max_bytes > 0
        self._slabs: Slabs | None = None
        self._generations = itertools.count(1)
        self._gone: collections.deque[SlabRegion] = collections.deque()
        self._pinned: set[SlabRegion] = set()
        self._pinned_bytes = 0
        self._handed_out_bytes = 0

    @property
    def slab_bytes(self) -> int:
        """What the slabs have of this machine's memory."""
        return self._pages.pages * PAGE_NBYTES

    @property
    def pinned_bytes(self) -> int:
        return self._pinned_bytes

    @property
    def handed_out_bytes(self) -> int:
        return self._handed_out_bytes

    @property
    def is_growing(self) -> bool:
        return self._has_slabs and self._pages.pages < self._max_pages

    def could_ever_fit(self, sizes: Sequence[int], charges: Sequence[int] = ()) -> bool:
        total = sum(sizes)
        if total + sum(charges) > self.max_bytes:
            return False
        if not self._has_slabs or total <= _HEAP_NBYTES:
            return True
        return sum(pack(sizes)[0]) <= self._max_pages

    def fits(self, sizes: Sequence[int], charges: Sequence[int] = ()) -> bool:
        self.collect()
        total = sum(sizes)
        if self._held_bytes + total + sum(charges) > self.max_bytes:
            return False
        blocks, _ = pack(sizes)
        fits = self._pages.fits(blocks, max_runs=self._max_runs)
        if fits or self._is_for_heap(total):
            return True
        return self._may_spill

    def allocate(
        self, sizes: Sequence[int], charges: Sequence[int] = ()
    ) -> list[Region] | None:
        if self._gone:
            self.collect()
        total, charged = sum(sizes), sum(charges)
        if self.used_bytes + self._pinned_bytes + total + charged > self.max_bytes:
            return None
        taken = None if self._is_for_heap(total) else self._take(sizes)
        if taken is not None:
            regions: list[Region] = [*taken]
        elif self._is_for_heap(total) or self._may_spill:
            regions = [Region(nbytes, self) for nbytes in sizes]
            self._heap_bytes += total
        else:
            self._want()
            return None
        regions += [Region(nbytes, self) for nbytes in charges]
        self._heap_bytes += charged
        self._charge(total + charged)
        return regions

    def take_spare(self, nbytes: int) -> SlabRegion | None:
        """Take a region for the application, if so much lies idle.

        If not, a slab is asked for, so that it does next time. The region may exceed
        the bound until it is handed out and released.
        """
        self.collect()
        if self.is_closed or nbytes <= _HEAP_NBYTES:
            return None
        regions = self._take([nbytes])
        if regions is None:
            self._want()
            return None
        self.used_bytes += nbytes  # not at its peak: it will be no one's soon
        return regions[0]

    def adopt(self, regions: Sequence[Region], charges: int = 0) -> bool:
        self.collect()
        sizes = [region.nbytes for region in regions]
        total = sum(sizes)
        if self._held_bytes + total > self.max_bytes:
            return False
        sizes = sizes[: len(sizes) - charges]
        if not self._is_for_heap(sum(sizes)):
            # Their memory stays where it is; as many pages are kept for them.
            placed = self._place(sizes)
            if placed is None and not self._may_spill:
                self._want()
                return False
            for region, (pages, _) in zip(regions, placed or (), strict=False):
                region.pages = pages
                pages.left += 1
        self._heap_bytes += sum(r.nbytes for r in regions if r.pages is None)
        for region in regions:
            region.charge_to(self)
        self._charge(total)
        return True

    def pin(self, region: SlabRegion) -> None:
        self._pinned.add(region)
        self.used_bytes -= region.nbytes
        if region.is_handed_out:
            self._handed_out_bytes += region.nbytes
        else:
            self._pinned_bytes += region.nbytes
        self._unmap_if_over()

    def unpin(self, region: SlabRegion) -> None:
        if region in self._pinned:
            self._pinned.discard(region)
            self.used_bytes += region.nbytes
            if region.is_handed_out:
                self._handed_out_bytes -= region.nbytes
            else:
                self._pinned_bytes -= region.nbytes

    def keep_for_child(self) -> None:
        """This process is about to be copied, views and all: their memory is theirs.

        Called in any thread.
        """
        for region in list(self._pinned):
            region.is_kept = True

    def memory_of(self, region: SlabRegion, *, writable: bool) -> _Bytes:
        pages, slabs = region.pages, self._slabs
        if pages is None or slabs is None:
            raise RuntimeError("a region outlived the slabs of its arena")
        memory = pages.memory if writable else None
        if memory is None:
            memory = slabs.of_runs(pages.runs, writable=writable)
        return memory[region.offset : region.offset + region.nbytes]

    def let_go(self, region: SlabRegion) -> None:
        self._gone.append(region)
        if region.is_released:  # else its release finds it
            self._freed()

    def collect(self) -> None:
        while self._gone:
            self._gone.popleft().end_hold()

    def give_back(self, region: Region) -> None:
        pages = region.pages
        if isinstance(region, SlabRegion):
            self.unpin(region)
        self.used_bytes -= region.nbytes
        if pages is None:
            self._heap_bytes -= region.nbytes
        else:
            pages.left -= 1
            if not pages.left:
                self._free_pages(pages)
        if self.is_closed:
            self._unmap_if_over()

    def make_slab(self) -> int | None:
        """Allocate the next slab; return its bytes, ``None`` for no shared memory.

        Blocks: to be called in a thread, by one at a time.
        """
        if self._slabs is None:
            try:
                self._slabs = Slabs(self.max_bytes)
            except (OSError, OverflowError, ValueError):
                return None
        return self._slabs.grow()

    def add_slab(self, nbytes: int | None) -> None:
        """Use what :meth:`make_slab` has returned, be it less than was needed."""
        if self.is_closed:
            self._unmap_if_over()
            return
        if nbytes is None:
            self._has_slabs = False
            self._refused("this process cannot have shared memory: it uses the heap")
            return
        asked = next_slab_nbytes(self.slab_bytes, self._max_pages * PAGE_NBYTES)
        if nbytes:
            self._pages.extend(nbytes // PAGE_NBYTES)
        if nbytes < asked:
            self._lower()

    def close(self) -> None:
        super().close()
        if self._slabs is not None:
            self._slabs.close()
        self._unmap_if_over()

    @property
    def _held_bytes(self) -> int:
        return self.used_bytes + self._pinned_bytes

    def _lower(self) -> None:
        self._max_pages = self._pages.pages
        self.max_bytes = max(self.slab_bytes, self._max_heap_bytes)
        self._refused(f"no more memory: the bound is {self.max_bytes} bytes now")

    def _refused(self, what: str) -> None:
        self.refused_slabs += 1
        logger.warning("%s", what)

    def _unmap_if_over(self) -> None:
        if self.is_closed and not self.used_bytes and self._slabs is not None:
            self._slabs = None  # what is pinned is unmapped with its last view
            for region in self._pinned:
                if region.pages is not None:
                    region.pages.memory = None

    def _is_for_heap(self, nbytes: int) -> bool:
        if not self._has_slabs:
            return True
        left = self._max_heap_bytes - self._heap_bytes
        return nbytes <= _HEAP_NBYTES and nbytes <= left

    @property
    def _may_spill(self) -> bool:
        return bool(self._handed_out_bytes) and not self.is_growing

    def _want(self) -> None:
        if self.is_growing and not self.is_closed:
            self._wanted()

    @property
    def _max_runs(self) -> int:
        is_for_one = self.is_growing or self._stitched_runs >= _MAX_STITCHED_RUNS
        return 1 if is_for_one else _MAX_RUNS

    def _take(self, sizes: Sequence[int]) -> list[SlabRegion] | None:
        placed, slabs = self._place(sizes), self._slabs
        if placed is None or slabs is None:
            return None
        taken = list(dict.fromkeys(pages for pages, _ in placed))
        try:
            for pages in taken:
                if len(pages.runs) > 1:
                    pages.memory = slabs.of_runs(pages.runs, writable=True)
        except OSError:  # too many mappings: there is room when others have left
            for pages in taken:
                self._free_pages(pages)
            return None
        return [
            SlabRegion(n, self, pages, offset, next(self._generations))
            for n, (pages, offset) in zip(sizes, placed, strict=True)
        ]

    def _place(self, sizes: Sequence[int]) -> list[tuple[Pages, int]] | None:
        """Return each size's pages, and the offset in them."""
        blocks, places = pack(sizes)
        taken = self._pages.allocate(blocks, max_runs=self._max_runs)
        if taken is None:
            return None
        self._stitched_runs += sum(len(runs) for runs in taken if len(runs) > 1)
        pages = [Pages(runs) for runs in taken]
        return [(pages[block], offset) for block, offset in places]

    def _free_pages(self, pages: Pages) -> None:
        pages.memory = None
        if len(pages.runs) > 1:
            self._stitched_runs -= len(pages.runs)
        for run in pages.runs:
            self._pages.free(*run)
