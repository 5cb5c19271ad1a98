"""Memory that was released while somebody has a view of it.

Rule of this file: everything but :meth:`Pins.let_go` and :meth:`Pins.keep_for_child`
runs on one thread, and nothing waits.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy
import numpy.typing

from asynckv.tensors.arena import Region
from asynckv.tensors.slab_pages import SlabPages
from asynckv.tensors.slab_regions import SlabRegion

__all__ = ("Pins",)

_Bytes: TypeAlias = numpy.typing.NDArray[numpy.uint8]


class Pins:
    """Looks after the views of one arena's regions: what those call their owner.

    ``freed`` is called, in any thread, when memory may have become free otherwise
    than by a call here: :meth:`collect` is to follow. ``pinned`` is told of a region
    that was released while the application still has it. ``charge`` is told of bytes
    that count, or (negative) no longer count as used, because they are pinned;
    ``give_back`` gets every region that nobody holds any more.
    """

    def __init__(
        self,
        pages: SlabPages | None,
        *,
        freed: Callable[[], None],
        pinned: Callable[[SlabRegion], None],
        charge: Callable[[int], None],
        give_back: Callable[[Region], None],
    ) -> None:
        self._pages = pages
        self._freed = freed
        self._tell_pinned = pinned
        self._charge = charge
        self._give_back = give_back
        self._gone: collections.deque[SlabRegion] = collections.deque()
        self._pinned: set[SlabRegion] = set()
        self.pinned_bytes = 0
        self.handed_out_bytes = 0

    def memory_of(self, region: SlabRegion, *, writable: bool) -> _Bytes:
        memory = self._slabs.memory_of(region.pages, writable=writable)
        return memory[region.offset : region.offset + region.nbytes]

    def spans_of(self, region: SlabRegion) -> tuple[_Bytes, Sequence[tuple[int, int]]]:
        return self._slabs.spans_of(region.pages, region.offset, region.nbytes)

    def let_go(self, region: SlabRegion) -> None:
        self._gone.append(region)
        if region.is_released:  # else its release finds it
            self._freed()

    def collect(self) -> None:
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

    def pin(self, region: SlabRegion) -> None:
        self._pinned.add(region)
        self._count(region, region.nbytes)
        if not (region.is_lent or region.is_handed_out):
            self._tell_pinned(region)

    def unpin(self, region: SlabRegion) -> None:
        if region in self._pinned:
            self._pinned.discard(region)
            self._count(region, -region.nbytes)

    def give_back(self, region: Region) -> None:
        if isinstance(region, SlabRegion):
            self.unpin(region)
        self._give_back(region)

    def keep_for_child(self) -> None:
        """This process is about to be copied, views and all: their memory is theirs.

        Called in any thread.
        """
        for region in list(self._pinned):
            if region.has_views:
                region.is_kept = True

    def forget_mappings(self) -> None:
        """What is pinned is unmapped with its last view from now on."""
        for region in self._pinned:
            if region.pages is not None:
                region.pages.memory = None

    @property
    def _slabs(self) -> SlabPages:
        if self._pages is None:
            raise TypeError("the memory of a GPU is not mapped here")
        return self._pages

    def _count(self, region: SlabRegion, nbytes: int) -> None:
        if region.is_handed_out:
            self.handed_out_bytes += nbytes
        else:
            self.pinned_bytes += nbytes
        self._charge(-nbytes)
