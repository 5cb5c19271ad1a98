"""Regions in pages that come when they are needed, beside small ones on the heap.

What arenas of shared memory and of a GPU have in common. Rule of this file: everything
runs on one thread, and nothing waits.
"""

from __future__ import annotations

import abc
import collections
import itertools
import logging
from collections.abc import Callable, Sequence
from typing import Final, Protocol, TypeAlias

import numpy
import numpy.typing

from asynckv.tensors.arena import Arena, Region
from asynckv.tensors.pages import Pages, Place, SlabPages
from asynckv.tensors.slab_regions import SlabRegion

__all__ = (
    "ArenaPages",
    "IdlePages",
    "PagedArena",
    "SlabArena",
)


_Bytes: TypeAlias = numpy.typing.NDArray[numpy.uint8]


logger = logging.getLogger(__name__)

_HEAP_NBYTES: Final = 64 * 1024
"""Entries of as few bytes ride with their frames on every path: nobody maps them."""

_HEAP_SHARE: Final = 16
_HEAP_LEAST_NBYTES: Final = 4 * 2**20
"""They stay on the heap up to a 16th of the bound, or 4 MiB: it comes on top."""


class IdlePages(Protocol):
    """Memory that an arena needs no more."""

    def drop(self) -> None:
        """Give it back, but for what there are views of. Blocks: in a thread, once."""


class ArenaPages(Protocol):
    """What an arena has its regions in."""

    is_usable: bool

    @property
    def nbytes(self) -> int:
        """What there is."""

    @property
    def free_bytes(self) -> int:
        """What no region has of that."""

    @property
    def is_growing(self) -> bool:
        """May there be more, and was it not asked for yet?"""

    def could_ever_fit(self, sizes: Sequence[int]) -> bool:
        """Is there room for tensors of these sizes, when all is there?"""

    def fits(self, sizes: Sequence[int]) -> bool:
        """Would :meth:`take` have pages for tensors of these sizes now?"""

    def take(self, sizes: Sequence[int]) -> list[Place] | None:
        """Take pages for tensors of these sizes, all or none."""

    def free(self, pages: Pages) -> None:
        """Give pages back that no region has any more."""

    def want(self) -> None:
        """Ask for more, if there can be more."""

    def make_slab(self) -> int | None:
        """Get more; return its bytes, ``None`` for no memory at all. In a thread."""

    def add_slab(self, nbytes: int | None) -> bool:
        """Use what :meth:`make_slab` has returned; ``False`` if it is too little."""

    def close(self) -> None:
        """Get no more."""

    def unmap(self) -> IdlePages | None:
        """Let all of it go; return it once."""


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
    """What :meth:`take_spare` has at least."""

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

    def could_ever_fit(self, sizes: Sequence[int], charges: Sequence[int] = ()) -> bool:
        total = sum(sizes)
        if total + sum(charges) > self.max_bytes:
            return False
        if not self.pages.is_usable or total <= _HEAP_NBYTES:
            return True
        return self.pages.could_ever_fit(sizes)

    def fits(self, sizes: Sequence[int], charges: Sequence[int] = ()) -> bool:
        self.collect()
        total = sum(sizes)
        if total + sum(charges) > self.free_bytes:
            return False
        return self.pages.fits(sizes) or self._is_for_heap(total) or self._may_spill

    def allocate(
        self, sizes: Sequence[int], charges: Sequence[int] = ()
    ) -> list[Region] | None:
        self.collect()
        total, charged = sum(sizes), sum(charges)
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
        regions += [Region(nbytes, self) for nbytes in charges]
        self._heap_bytes += charged
        self._charge(total + charged)
        return regions

    def has_spare(self, nbytes: int) -> bool:
        """Is there no need to wait for slabs with so much for the application?"""
        if self.pages.free_bytes >= nbytes or not self._may_be_spare(nbytes):
            return True
        self.collect()
        return self.pages.free_bytes >= nbytes

    def take_spare(self, nbytes: int) -> SlabRegion | None:
        """Take a region for the application, if so much lies idle.

        If not, a slab is asked for, so that it does next time. The region may exceed
        the bound until it is handed out and released.
        """
        regions = self.take_spares([nbytes])
        return None if regions is None else regions[0]

    def take_spares(self, sizes: Sequence[int]) -> list[SlabRegion] | None:
        """As :meth:`take_spare`, several at once: all or none."""
        self.collect()
        if self.is_closed or min(sizes, default=0) < self.least_spare_nbytes:
            return None
        regions = self._take(sizes)
        if regions is None:
            self.pages.want()
            return None
        self.used_bytes += sum(sizes)  # not at its peak: it will be no one's soon
        return regions

    def adopt(self, regions: Sequence[Region], charges: int = 0) -> bool:
        self.collect()
        sizes = [region.nbytes for region in regions]
        total = sum(sizes)
        if total > self.free_bytes:
            return False
        sizes = sizes[: len(sizes) - charges]
        if not self._is_for_heap(sum(sizes)):
            # Their memory stays where it is; as many pages are kept for them.
            placed = self.pages.take(sizes)
            if placed is None and not self._may_spill:
                self.pages.want()
                return False
            for region, (pages, _) in zip(regions, placed or (), strict=False):
                region.pages = pages
                pages.left += 1
        self._heap_bytes += sum(r.nbytes for r in regions if r.pages is None)
        for region in regions:
            region.charge_to(self)
        self._charge(total)
        return True

    def collect(self) -> None:
        """Take memory back whose last view is gone."""
        for _ in range(len(self._gone)):
            region = self._gone.popleft()
            if region.is_quiet:
                region.end_hold()
            else:
                self._gone.append(region)

    @property
    def is_waiting(self) -> bool:
        """Is there memory that something is still at work with? Then look again."""
        return bool(self._gone)

    def memory_of(self, region: SlabRegion, *, writable: bool) -> _Bytes:
        raise TypeError("the memory of a GPU is not mapped here")

    def spans_of(self, region: SlabRegion) -> tuple[_Bytes, Sequence[tuple[int, int]]]:
        raise TypeError("the memory of a GPU is not mapped here")

    def view_ended(self, region: SlabRegion) -> None:
        self._gone.append(region)
        if region.is_released:  # else its release finds it
            self._freed()

    def pin(self, region: SlabRegion) -> None:
        self._pinned.add(region)
        self._count_pinned(region, region.nbytes)
        if self.is_closed:
            self._unmap_if_over()
        if not (region.is_borrowed or region.is_handed_out):
            self._tell_pinned(region)

    def unpin(self, region: SlabRegion) -> None:
        if region in self._pinned:
            self._pinned.discard(region)
            self._count_pinned(region, -region.nbytes)

    def give_back(self, region: Region) -> None:
        if isinstance(region, SlabRegion):
            self.unpin(region)
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
