"""Regions in pages that come when they are needed, beside small ones on the heap.

What arenas of shared memory and of a GPU have in common. A region's memory is somebody
else's only when the region was released *and* the last tensor or view of it is gone,
wherever that is: each hold on it ends by the finalizer of what the views are based on.
That may run in any thread and at any moment, so it only notes the region; the arena's
thread does the rest, and nothing waits.
"""

from __future__ import annotations

import abc
import collections
import itertools
import logging
from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

import numpy
import numpy.typing
import torch

from asynckv.tensors.arena import Arena, Hold, Region, heap_memory
from asynckv.tensors.pages import (
    SHARED_PAGES_BELOW,
    ArenaPages,
    IdlePages,
    Pages,
    SlabPages,
)
from asynckv.tensors.runs import Memory, runs_at
from asynckv.tensors.slabs import PAGE_NBYTES
from asynckv.tensors.views import tensor_over
from asynckv.types import TensorSpec

__all__ = (
    "PagedArena",
    "SlabArena",
    "SlabRegion",
)


_Bytes: TypeAlias = numpy.typing.NDArray[numpy.uint8]


class _Window:
    """What the views of one region are based on: its life is a hold on the region."""

    __slots__ = ("__array_interface__", "_memory", "_owner", "_region")

    def __init__(self, region: SlabRegion, owner: PagedArena, memory: _Bytes) -> None:
        self._region = region
        self._owner = owner
        self._memory = memory
        self.__array_interface__ = memory.__array_interface__

    def __del__(self) -> None:
        self._owner.view_ended(self._region)


class _PeerHold(Hold):
    __slots__ = ("_slab_region",)

    def __init__(self, region: SlabRegion) -> None:
        super().__init__(region)
        self._slab_region = region

    def release(self) -> None:
        if self._region is not None:
            self._region = None
            self._slab_region.end_peers_hold()


class SlabRegion(Region):
    """Memory of one tensor in the slabs, at ``offset`` of its ``pages``.

    ``generation`` differs between all regions that an arena has ever had.
    """

    __slots__ = (
        "__weakref__",
        "_owner",
        "_peers",
        "generation",
        "is_borrowed",
        "is_handed_out",
        "is_kept",
        "offset",
    )

    is_shared = True

    def __init__(
        self,
        nbytes: int,
        owner: PagedArena,
        pages: Pages,
        offset: int,
        generation: int,
    ) -> None:
        super().__init__(nbytes, None)
        self.pages = pages
        self.offset = offset
        self.generation = generation
        self.is_handed_out = False
        """Do its last views belong to the application, which nobody charges?"""
        self.is_kept = False
        """Has a forked child views too, whose end nobody here learns of?"""
        self.is_borrowed = False
        """Was it made for somebody who may insert it, and has not yet?"""
        self._owner: PagedArena | None = owner
        self._peers = 0
        pages.left += 1

    def view(self) -> memoryview:
        """Return the bytes, writable, without a copy; scratch once it is released.

        :raises OSError: they lie apart, and the process may have no more mappings
        """
        owner = self._owner
        if self.is_released or owner is None:
            return heap_memory(self.nbytes)
        # Not kept here: it holds this region.
        return self._held(owner, owner.memory_of(self, writable=True)).data

    def memory(self) -> Memory:
        owner, pages = self._owner, self.pages
        if self.is_released or owner is None or pages is None or len(pages.runs) < 2:
            return self.view()
        base, spans = owner.spans_of(self)
        return runs_at(self._held(owner, base).data, spans)

    def page_memory(self) -> Memory | None:
        owner = self._owner
        if self.is_released or owner is None or self.nbytes < SHARED_PAGES_BELOW:
            return None
        base, spans = owner.spans_of(self)
        *others, (start, stop) = spans
        pages = [*others, (start, -(-stop // PAGE_NBYTES) * PAGE_NBYTES)]
        return runs_at(self._held(owner, base).data, pages)

    def constant(self, spec: TensorSpec) -> torch.Tensor:
        """Return a tensor over these bytes that must never be written: a crash."""
        owner = self._owner
        if self.is_released or owner is None:
            raise RuntimeError("the region was released")
        memory = owner.memory_of(self, writable=False)
        return tensor_over(self._held(owner, memory), spec)

    def can_change_hands(self) -> bool:
        owner = self._owner
        if self.is_released or owner is None:
            return False
        owner.collect()
        return not self._holds

    def hand_out(self) -> None:
        self.is_handed_out = True

    @property
    def is_pinned(self) -> bool:
        """Is it kept from others, although it was released, and counts for that?"""
        return self.is_released and self._owner is not None and not self.is_handed_out

    @property
    def has_views(self) -> bool:
        """May somebody in this process have one?"""
        return self._holds > self._peers

    @property
    def is_read_by_peers(self) -> bool:
        """May another process read there?"""
        return self._peers > 0

    def hold(self) -> Hold:
        """As the contract says: for peers, who have their views elsewhere."""
        self._holds += 1
        self._peers += 1
        return _PeerHold(self)

    def end_peers_hold(self) -> None:
        """The hold of one peer is over."""
        self._peers -= 1
        self.end_hold()

    def own(self) -> bool:
        """Undo a release that is not over yet; ``False`` if there is none."""
        if not self.is_released or self._owner is None:
            return False
        self.is_released = self.is_borrowed = False
        self._owner.unpin(self)
        return True

    def release(self) -> None:
        owner = self._owner
        if owner is not None and not self.is_released:
            self.is_released = True
            owner.collect()
            if self._holds:
                owner.pin(self)
            else:
                self._give_back_if_over()

    def charge_to(self, arena: object) -> None:
        raise RuntimeError("a region of the slabs is charged from the start")

    def _give_back_if_over(self) -> None:
        owner = self._owner
        if owner is None or self._holds or not self.is_released:
            return
        if self.is_kept:
            owner.unpin(self)
            self.is_handed_out = True  # for good: it must not count for ever
            owner.pin(self)
        else:
            self._owner = None
            owner.unpin(self)
            owner.give_back(self)

    def _held(self, owner: PagedArena, memory: _Bytes) -> _Bytes:
        self._holds += 1
        return numpy.asarray(_Window(self, owner, memory))


logger = logging.getLogger(__name__)

_HEAP_NBYTES: Final = 64 * 1024
"""Entries of as few bytes ride with their frames on every path: nobody maps them."""

_HEAP_SHARE: Final = 16
_HEAP_LEAST_NBYTES: Final = 4 * 2**20
"""They stay on the heap up to a 16th of the bound, or 4 MiB: it comes on top."""


class PagedArena(Arena):
    """Regions in ``pages`` of up to ``max_bytes``.

    ``freed`` is called, in any thread, when memory may have become free otherwise than
    by a call here: :meth:`collect` is to follow. ``pinned`` is told of a region that
    somebody has a view of when its entry leaves; ``unmapped`` gets the pages of a
    closed arena when nothing is in them any more but such views.

    Memory that cannot be had lowers ``max_bytes``; where there is none at all, regions
    are on the heap.

    Memory that was handed out is the application's: it counts no more, but its pages
    are nobody else's while a view lives. What has no place because of it is on the
    heap, so that nothing waits for the application to forget what it took.
    """

    least_spare_nbytes = _HEAP_NBYTES + 1
    """What :meth:`take_spares` has at least."""

    def __init__(
        self,
        max_bytes: int,
        pages: ArenaPages,
        *,
        freed: Callable[[], None],
        pinned: Callable[[SlabRegion], None] = lambda region: None,
        unmapped: Callable[[IdlePages], None] = lambda idle: None,
    ) -> None:
        super().__init__(max_bytes)
        self._max_heap_bytes = max(max_bytes // _HEAP_SHARE, _HEAP_LEAST_NBYTES)
        self._heap_bytes = 0
        self._generations = itertools.count(1)
        self._freed = freed
        self._tell_pinned = pinned
        self._unmapped = unmapped
        self._gone: collections.deque[SlabRegion] = collections.deque()
        """Regions of which a view has ended, since :meth:`collect` or before it."""
        self._pinned: set[SlabRegion] = set()
        self.pages = pages

    @property
    def is_growing(self) -> bool:
        return self.pages.is_growing

    def could_ever_fit(self, sizes: Sequence[int], charged: int = 0) -> bool:
        total = sum(sizes)
        if total + charged > self.max_bytes:
            return False
        if not self.pages.is_usable or total <= _HEAP_NBYTES:
            return True
        return self.pages.could_ever_fit(sizes)

    def fits(self, sizes: Sequence[int], charged: int = 0) -> bool:
        self.collect()
        total = sum(sizes)
        if total + charged > self.free_bytes:
            return False
        return self.pages.fits(sizes) or self._is_for_heap(total) or self._may_spill

    def allocate(self, sizes: Sequence[int], charged: int = 0) -> list[Region] | None:
        self.collect()
        total = sum(sizes)
        if total + charged > self.free_bytes:
            return None
        is_for_heap = self._is_for_heap(total)
        taken = None if is_for_heap else self._take(sizes)
        if taken is not None:
            regions: list[Region] = [*taken]
        elif is_for_heap or self._may_spill:
            regions = [self._on_heap(nbytes) for nbytes in sizes]
            self._heap_bytes += total
        else:
            self.pages.want()
            return None
        self._heap_bytes += charged
        self._charge(total + charged)
        return regions

    def has_spare(self, nbytes: int) -> bool:
        """Is there no need to wait for slabs with so much for the application?"""
        if self.pages.free_bytes >= nbytes or not self._may_be_spare(nbytes):
            return True
        self.collect()
        return self.pages.free_bytes >= nbytes

    def take_spares(self, sizes: Sequence[int]) -> list[SlabRegion] | None:
        """Take regions for the application, all or none, if so much lies idle.

        If not, a slab is asked for, so that it does next time. They may exceed the
        bound until they are handed out and released.
        """
        self.collect()
        if self.is_closed or min(sizes, default=0) < self.least_spare_nbytes:
            return None
        regions = self._take(sizes)
        if regions is None:
            self.pages.want()
            return None
        self.used_bytes += sum(sizes)  # not at its peak: it will be no one's soon
        return regions

    def adopt(self, regions: Sequence[Region], charged: int = 0) -> bool:
        self.collect()
        sizes = [region.nbytes for region in regions]
        total = sum(sizes)
        if total + charged > self.free_bytes:
            return False
        if not self._is_for_heap(total):
            # Their memory stays where it is; as many pages are kept for them.
            placed = self.pages.take(sizes)
            if placed is None and not self._may_spill:
                self.pages.want()
                return False
            for region, (pages, _) in zip(regions, placed or (), strict=False):
                region.pages = pages
                pages.left += 1
        self._heap_bytes += charged
        self._heap_bytes += sum(r.nbytes for r in regions if r.pages is None)
        for region in regions:
            region.charge_to(self)
        self._charge(total + charged)
        return True

    def free(self, regions: Sequence[Region], charged: int = 0) -> None:
        super().free(regions, charged)
        self._heap_bytes -= charged
        if self.is_closed:
            self._unmap_if_over()

    def collect(self) -> None:
        """Take memory back whose last view is gone."""
        while self._gone:
            self._gone.popleft().end_hold()

    def memory_of(self, region: SlabRegion, *, writable: bool) -> _Bytes:
        """Return a region's bytes, without a hold on it.

        :raises OSError: they lie apart, and cannot be mapped together
        """
        raise TypeError("the memory of a GPU is not mapped here")

    def spans_of(self, region: SlabRegion) -> tuple[_Bytes, Sequence[tuple[int, int]]]:
        """Return all memory, and where a region's bytes begin and end in it."""
        raise TypeError("the memory of a GPU is not mapped here")

    def view_ended(self, region: SlabRegion) -> None:
        """A view is gone. Called by finalizers: in any thread, at any moment."""
        self._gone.append(region)
        if region.is_released:  # else its release finds it
            self._freed()

    def pin(self, region: SlabRegion) -> None:
        """A region was released while somebody has a view."""
        self._pinned.add(region)
        self._count_pinned(region, region.nbytes)
        if self.is_closed:
            self._unmap_if_over()
        if not (region.is_borrowed or region.is_handed_out):
            self._tell_pinned(region)

    def unpin(self, region: SlabRegion) -> None:
        """Its memory is given back, or has an owner again."""
        if region in self._pinned:
            self._pinned.discard(region)
            self._count_pinned(region, -region.nbytes)

    def give_back(self, region: Region) -> None:
        pages = region.pages
        self.used_bytes -= region.nbytes
        if pages is None:
            self._heap_bytes -= region.nbytes
        else:
            pages.left -= 1
            if not pages.left:
                self.pages.free(pages)
        if self.is_closed:
            self._unmap_if_over()

    def keep_for_child(self) -> None:
        """This process is about to be copied, views and all: their memory is theirs.

        Called in any thread.
        """
        for region in list(self._pinned):
            if region.has_views:
                region.is_kept = True

    def add_slab(self, nbytes: int | None) -> None:
        """Use what :meth:`ArenaPages.make_slab` has returned, be it too little."""
        if self.is_closed:
            self._unmap_if_over()
            return
        if self.pages.add_slab(nbytes):
            return
        self.refused_slabs += 1
        if nbytes is None:
            logger.warning(
                "no memory that peers of this host could map: it uses the heap"
            )
            return
        self.max_bytes = max(self.pages.nbytes, self._max_heap_bytes)
        logger.warning("no more memory: the bound is %d bytes now", self.max_bytes)

    def close(self) -> None:
        super().close()
        self.pages.close()
        self._unmap_if_over()

    def _take(self, sizes: Sequence[int]) -> list[SlabRegion] | None:
        placed = self.pages.take(sizes)
        if placed is None:
            return None
        return [
            self._region(nbytes, pages, offset, next(self._generations))
            for nbytes, (pages, offset) in zip(sizes, placed, strict=True)
        ]

    @abc.abstractmethod
    def _region(
        self, nbytes: int, pages: Pages, offset: int, generation: int
    ) -> SlabRegion:
        """Make a region there."""

    def _on_heap(self, nbytes: int) -> Region:
        return Region(nbytes, self)

    def _may_be_spare(self, nbytes: int) -> bool:
        is_large = nbytes >= self.least_spare_nbytes
        return is_large and self.pages.could_ever_fit([nbytes])

    def _count_pinned(self, region: SlabRegion, nbytes: int) -> None:
        """So many bytes more are pinned, or handed out, and are used no longer."""
        if region.is_handed_out:
            self.handed_out_bytes += nbytes
        else:
            self.pinned_bytes += nbytes
        self.used_bytes -= nbytes

    def _unmap_if_over(self) -> None:
        if self.used_bytes:
            return
        idle = self.pages.unmap()
        for region in self._pinned:  # unmapped with its last view from now on
            if region.pages is not None:
                region.pages.memory = None
        if idle is not None:
            self._unmapped(idle)

    def _is_for_heap(self, nbytes: int) -> bool:
        if not self.pages.is_usable:
            return True
        left = self._max_heap_bytes - self._heap_bytes
        return nbytes <= _HEAP_NBYTES and nbytes <= left

    @property
    def _may_spill(self) -> bool:
        return bool(self.handed_out_bytes) and not self.is_growing


class SlabArena(PagedArena):
    """Regions in slabs that are allocated as they are needed, up to ``max_bytes``.

    ``wanted`` is called when a slab is needed: :meth:`SlabPages.make_slab`, in a
    thread, then :meth:`add_slab` are to follow.
    """

    pages: SlabPages

    def __init__(
        self,
        max_bytes: int,
        *,
        wanted: Callable[[], None],
        freed: Callable[[], None],
        pinned: Callable[[SlabRegion], None] = lambda region: None,
        unmapped: Callable[[IdlePages], None] = lambda idle: None,
    ) -> None:
        pages = SlabPages(max_bytes, wanted)
        super().__init__(
            max_bytes, pages, freed=freed, pinned=pinned, unmapped=unmapped
        )

    def _region(
        self, nbytes: int, pages: Pages, offset: int, generation: int
    ) -> SlabRegion:
        return SlabRegion(nbytes, self, pages, offset, generation)

    def memory_of(self, region: SlabRegion, *, writable: bool) -> _Bytes:
        memory = self.pages.memory_of(region.pages, writable=writable)
        return memory[region.offset : region.offset + region.nbytes]

    def spans_of(self, region: SlabRegion) -> tuple[_Bytes, Sequence[tuple[int, int]]]:
        return self.pages.spans_of(region.pages, region.offset, region.nbytes)
