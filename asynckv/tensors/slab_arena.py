"""Regions in shared memory that grows, beside few small ones on the heap.

A region's memory is somebody else's only when the region was released *and* the
last tensor or view of it is gone, wherever that is: each hold on it ends by the
finalizer of what the views are based on. That may run in any thread and at any
moment, so it only notes the region; the owner's thread does the rest.

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
import torch

from asynckv.tensors.allocator import PageAllocator
from asynckv.tensors.arena import Arena, Pages, Region, heap_memory
from asynckv.tensors.packing import pack, pages_of
from asynckv.tensors.slabs import PAGE_NBYTES, Slabs, next_slab_nbytes
from asynckv.tensors.views import tensor_over
from asynckv.types import TensorSpec

__all__ = ("SlabArena", "SlabRegion")

logger = logging.getLogger(__name__)

_HEAP_NBYTES: Final = 64 * 1024
"""Entries of as few bytes ride with their frames on every path: nobody maps them."""

_HEAP_SHARE: Final = 16
_HEAP_LEAST_NBYTES: Final = 4 * 2**20
"""They stay on the heap up to a 16th of the bound, or 4 MiB: it comes on top."""

_Bytes: TypeAlias = numpy.typing.NDArray[numpy.uint8]


class _Window:
    """What the views of one region are based on: its life is a hold on the region."""

    __slots__ = ("__array_interface__", "_arena", "_memory", "_region")

    def __init__(self, region: SlabRegion, arena: SlabArena, memory: _Bytes) -> None:
        self._region = region
        self._arena = arena
        self._memory = memory
        self.__array_interface__ = memory.__array_interface__

    def __del__(self) -> None:
        self._arena.let_go(self._region)


class SlabRegion(Region):
    """Memory of one tensor in the slabs, at ``offset``.

    ``generation`` differs between all regions that an arena has ever had.
    """

    __slots__ = ("generation", "offset")

    is_shared = True

    def __init__(
        self, nbytes: int, arena: SlabArena, pages: Pages, offset: int, generation: int
    ) -> None:
        super().__init__(nbytes, arena)
        self.pages = pages
        self.offset = offset
        self.generation = generation
        pages.left += 1

    def view(self) -> memoryview:
        """Return the bytes, writable, without a copy; scratch once it is released."""
        arena = self._arena
        if self._is_released or not isinstance(arena, SlabArena):
            return heap_memory(self.nbytes)
        return arena.window(self).data  # not kept here: it holds this region

    def constant(self, spec: TensorSpec) -> torch.Tensor:
        """Return a tensor over these bytes that must never be written: a crash."""
        arena = self._arena
        if self._is_released or not isinstance(arena, SlabArena):
            raise RuntimeError("the region was released")
        return tensor_over(arena.window(self, writable=False), spec)

    def own(self) -> bool:
        """Undo a release that is not over yet; ``False`` if there is none."""
        arena = self._arena
        if not self._is_released or not isinstance(arena, SlabArena):
            return False
        self._is_released = False
        arena.unpin(self)
        return True

    def release(self) -> None:
        arena = self._arena
        if isinstance(arena, SlabArena) and not self._is_released:
            self._is_released = True
            arena.collect()
            self._give_back_if_over()
            if self._holds:
                arena.pin(self)


class SlabArena(Arena):
    """Regions in slabs that are allocated as they are needed, up to ``max_bytes``.

    ``wanted`` is called when a slab is needed: :meth:`make_slab`, in a thread, then
    :meth:`add_slab` are to follow. ``freed`` is called, in any thread, when memory
    may have become free otherwise than by a call here: :meth:`collect` is to follow.

    A slab that cannot be had lowers ``max_bytes``; where there is no shared memory
    at all, regions are on the heap.
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
        self._has_slabs = max_bytes > 0
        self._slabs: Slabs | None = None
        self._generations = itertools.count(1)
        self._gone: collections.deque[SlabRegion] = collections.deque()
        self._pinned: set[SlabRegion] = set()
        self._pinned_bytes = 0
        self._lent: dict[int, SlabRegion] = {}
        """Regions of tensors that :meth:`lend` has returned, by their offsets."""
        self._address = 0

    @property
    def slab_bytes(self) -> int:
        """What the slabs have of this machine's memory."""
        return self._pages.pages * PAGE_NBYTES

    @property
    def pinned_bytes(self) -> int:
        return self._pinned_bytes

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
        return self._is_for_heap(total) or self._pages.fits(pack(sizes)[0])

    def allocate(
        self, sizes: Sequence[int], charges: Sequence[int] = ()
    ) -> list[Region] | None:
        if self._gone:
            self.collect()
        total, charged = sum(sizes), sum(charges)
        if self.used_bytes + self._pinned_bytes + total + charged > self.max_bytes:
            return None
        regions: list[Region] = []
        if self._is_for_heap(total):
            regions = [Region(nbytes, self) for nbytes in sizes]
            self._heap_bytes += total
        else:
            placed = self._place(sizes)
            if placed is None:
                return None
            regions += [
                SlabRegion(n, self, pages, offset, next(self._generations))
                for n, (pages, offset) in zip(sizes, placed, strict=True)
            ]
        regions += [Region(nbytes, self) for nbytes in charges]
        self._heap_bytes += charged
        self._charge(total + charged)
        return regions

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
            if placed is None:
                return False
            for region, (pages, _) in zip(regions, placed, strict=False):
                region.pages = pages
                pages.left += 1
        self._heap_bytes += sum(r.nbytes for r in regions if r.pages is None)
        for region in regions:
            region.charge_to(self)
        self._charge(total)
        return True

    def lend(self, spec: TensorSpec) -> torch.Tensor | None:
        """Return a tensor in the slabs that is charged as long as it lives.

        ``None`` where it is small, or there is no room for it now.
        """
        if self.is_closed or spec.nbytes <= _HEAP_NBYTES or not self._has_slabs:
            return None
        regions = self.allocate([spec.nbytes])
        region = regions[0] if regions else None
        if not isinstance(region, SlabRegion):
            return None
        tensor = tensor_over(self.window(region), spec)
        self._address = tensor.data_ptr() - region.offset
        self._lent[region.offset] = region
        region.release()
        return tensor

    @property
    def has_lent(self) -> bool:
        """Is there a tensor from :meth:`lend` that lives?"""
        return bool(self._lent)

    def lent(self, tensor: torch.Tensor) -> SlabRegion | None:
        """Return the region that is all of a tensor from :meth:`lend`.

        ``None`` for any other tensor, and for one whose region has an owner.
        """
        if not self._lent or tensor.layout is not torch.strided:
            return None
        region = self._lent.get(tensor.data_ptr() - self._address)
        if region is None or not region._is_released:
            return None
        is_whole = tensor.nbytes == region.nbytes and tensor.is_contiguous()
        return (
            region if is_whole and not (tensor.is_conj() or tensor.is_neg()) else None
        )

    def pin(self, region: SlabRegion) -> None:
        """Note a region that was released while somebody has a view."""
        self._pinned.add(region)
        self._pinned_bytes += region.nbytes
        self.used_bytes -= region.nbytes
        self._unmap_if_over()

    def unpin(self, region: SlabRegion) -> None:
        """Its memory was given back, or has an owner again."""
        if region in self._pinned:
            self._pinned.discard(region)
            self._pinned_bytes -= region.nbytes
            self.used_bytes += region.nbytes

    def window(self, region: SlabRegion, *, writable: bool = True) -> _Bytes:
        """Return a region's bytes, held as long as they or a view of them live."""
        slabs = self._slabs
        if slabs is None:
            raise RuntimeError("a region outlived the slabs of its arena")
        memory = slabs.memory if writable else slabs.constant
        piece = memory[region.offset : region.offset + region.nbytes]
        region._holds += 1
        return numpy.asarray(_Window(region, self, piece))

    def let_go(self, region: SlabRegion) -> None:
        """A hold ended. Called by finalizers: in any thread, at any moment."""
        self._gone.append(region)
        if region._is_released:  # else its release finds it
            self._freed()

    def collect(self) -> None:
        """Take memory back that was let go of."""
        while self._gone:
            self._gone.popleft().end_hold()

    def give_back(self, region: Region) -> None:
        pages = region.pages
        if isinstance(region, SlabRegion):
            self.unpin(region)
            self._lent.pop(region.offset, None)
        self.used_bytes -= region.nbytes
        if pages is None:
            self._heap_bytes -= region.nbytes
        else:
            pages.left -= 1
            if not pages.left:
                self._pages.free(pages.first, pages.count)
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
        if self.is_closed and not self.used_bytes:
            self._slabs = None  # what is pinned is unmapped with its last view

    def _is_for_heap(self, nbytes: int) -> bool:
        if not self._has_slabs:
            return True
        left = self._max_heap_bytes - self._heap_bytes
        return nbytes <= _HEAP_NBYTES and nbytes <= left

    def _place(self, sizes: Sequence[int]) -> list[tuple[Pages, int]] | None:
        """Return each size's pages and offset, or ask for a slab."""
        blocks, places = pack(sizes)
        firsts = self._pages.allocate(blocks)
        if firsts is None:
            if self.is_growing and not self.is_closed:
                self._wanted()
            return None
        taken = [Pages(first, n) for first, n in zip(firsts, blocks, strict=True)]
        return [
            (taken[block], taken[block].first * PAGE_NBYTES + offset)
            for block, offset in places
        ]
