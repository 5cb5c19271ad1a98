"""Where a buffer's bytes live: the seam between admission and memory.

A buffer asks its arena for regions, one a tensor, and never counts bytes
itself. :class:`HeapArena` takes them from the heap,
:class:`~asynckv.tensors.paged_arena.SlabArena` from memory that can be shared; that
of a device stands behind the same class.
"""

from __future__ import annotations

import abc
import ctypes
from collections.abc import Sequence
from typing import ClassVar, Final

import numpy
import torch

from asynckv.tensors.pages import ALIGNMENT_NBYTES, Pages
from asynckv.tensors.runs import Memory, fill, joined
from asynckv.tensors.views import no_memory, tensor_over
from asynckv.types import TensorSpec

__all__ = (
    "Arena",
    "HeapArena",
    "Hold",
    "Region",
    "heap_memory",
)


_SMALL_NBYTES: Final = 4096


class Region:
    """Memory of one tensor, charged to an arena until it is given back.

    That is when it was released *and* nobody holds it any more. Heap memory is
    made when it is first looked at, and lives as long as anything refers to it.
    """

    __slots__ = ("_arena", "_holds", "_view", "is_released", "nbytes", "pages")

    is_shared: ClassVar[bool] = False
    """Is it memory that will be somebody else's, once it is given back?"""

    is_on_device: ClassVar[bool] = False
    """Is it a GPU's? Then it has no :meth:`view` and no :meth:`memory`."""

    def __init__(self, nbytes: int, arena: Arena | None) -> None:
        self.nbytes = nbytes
        self.pages: Pages | None = None
        """Pages of the arena that it takes, be they its memory or a charge."""
        self._arena = arena
        self._view: memoryview | None = None
        self._holds = 0
        self.is_released = False
        """Has it no owner any more, but those who hold it?"""

    @property
    def is_read_by_peers(self) -> bool:
        """Was it shown to a peer that may read it still?"""
        return False

    def view(self) -> memoryview:
        """Return the bytes, writable, without a copy.

        :raises EntryTooLarge: of the heap, and the process may have no more
        """
        if self._view is None:
            self._view = heap_memory(self.nbytes)
        return self._view

    def tensor(self, spec: TensorSpec) -> torch.Tensor:
        """Return a tensor over these bytes, without a copy."""
        return tensor_over(self.view(), spec)

    def memory(self) -> Memory:
        """Return the bytes where they lie, be that in several places.

        No memory is mapped for it, which a first use of would fault in page by page:
        for whoever only moves bytes.
        """
        return self.view()

    def page_memory(self) -> Memory | None:
        """Return the bytes to the end of their last page, where pages are its own.

        ``None`` where it has none, or shares them. What follows the region's bytes may
        be written to, and means nothing.
        """
        return None

    def read(self) -> memoryview | None:
        """Return the bytes in one piece; ``None`` of a GPU's, which has none here."""
        return joined(self.memory())

    def write(self, piece: memoryview) -> bool:
        """Put so few bytes there now; ``False`` if it is a GPU's."""
        fill(self.memory(), piece)
        return True

    def hold(self) -> Hold:
        """Keep the memory as it is, also when it is released, until the hold ends."""
        self._holds += 1
        return Hold(self)

    def can_change_hands(self) -> bool:
        """Can the memory itself be given away, because nobody else has a view?"""
        return True

    def hand_out(self) -> None:
        """From its release on the memory is the application's, and charged to nobody.

        For regions that can change hands, after the application's view was made.
        """

    def release(self) -> None:
        """Give the charge back, once nobody holds it. A second call does nothing."""
        if self.is_released:
            return
        self.is_released = True
        if not self._holds and (arena := self._arena) is not None:
            self._arena = None
            arena.give_back(self)

    def charge_to(self, arena: Arena) -> None:
        """Charge memory that belonged to nobody to ``arena``."""
        self._arena = arena

    def end_hold(self) -> None:
        """One hold is over. Called by holds, on the arena's thread."""
        self._holds -= 1
        self._give_back_if_over()

    def _give_back_if_over(self) -> None:
        if self.is_released and not self._holds:
            arena, self._arena = self._arena, None
            if arena is not None:
                arena.give_back(self)


class Hold:
    """One user of a region's memory. Ends when it is released, once."""

    __slots__ = ("_region",)

    def __init__(self, region: Region) -> None:
        self._region: Region | None = region

    def release(self) -> None:
        """Let the memory go. A second call does nothing."""
        region, self._region = self._region, None
        if region is not None:
            region.end_hold()


class Arena(abc.ABC):
    """A hard bound on bytes and the memory below it.

    ``charged`` bytes live elsewhere and count here, beside those of regions.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.used_bytes = 0
        self.peak_bytes = 0
        self.pinned_bytes = 0
        """Bytes that were released, and that somebody still has a view of."""
        self.handed_out_bytes = 0
        """Bytes that the application took and has not forgotten yet: not counted."""
        self.refused_slabs = 0
        """How often the system had less memory than the bound allows."""
        self.is_closed = False

    @property
    def is_growing(self) -> bool:
        """Can there be room where there is none now, although nobody leaves?"""
        return False

    @property
    def free_bytes(self) -> int:
        """Bytes that are neither used nor pinned."""
        return self.max_bytes - self.used_bytes - self.pinned_bytes

    def could_ever_fit(self, sizes: Sequence[int], charged: int = 0) -> bool:
        """Would regions of these sizes fit if the arena were empty?"""
        return sum(sizes) + charged <= self.max_bytes

    def fits(self, sizes: Sequence[int], charged: int = 0) -> bool:
        """Would regions of these sizes fit now?"""
        return sum(sizes) + charged <= self.free_bytes

    @abc.abstractmethod
    def allocate(self, sizes: Sequence[int], charged: int = 0) -> list[Region] | None:
        """Take one region a size, all or none. Never waits."""

    def allocate_outside(self, sizes: Sequence[int]) -> list[Region]:
        """Make regions that are charged to nobody here (a consumer pays for them)."""
        return [Region(nbytes, None) for nbytes in sizes]

    def adopt(self, regions: Sequence[Region], charged: int = 0) -> bool:
        """Charge regions from :meth:`allocate_outside` to this arena, if they fit."""
        sizes = [region.nbytes for region in regions]
        if not self.fits(sizes, charged):
            return False
        for region in regions:
            region.charge_to(self)
        self._charge(sum(sizes) + charged)
        return True

    def free(self, regions: Sequence[Region], charged: int = 0) -> None:
        """Release every one of ``regions``, and what was charged beside them."""
        for region in regions:
            region.release()
        self.used_bytes -= charged

    def give_back(self, region: Region) -> None:
        """Called by a region that was released and that nobody holds."""
        self.used_bytes -= region.nbytes

    def close(self) -> None:
        """No more memory is needed. What is held stays until it is let go."""
        self.is_closed = True

    def _charge(self, nbytes: int) -> None:
        self.used_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)


class HeapArena(Arena):
    """Regions from the process's heap."""

    def allocate(self, sizes: Sequence[int], charged: int = 0) -> list[Region] | None:
        if not self.fits(sizes, charged):
            return None
        regions = [Region(nbytes, self) for nbytes in sizes]
        self._charge(sum(sizes) + charged)
        return regions


def heap_memory(nbytes: int) -> memoryview:
    """Return ``nbytes`` of new memory, writable.

    More than 4 KiB begins at a multiple of 64, as in slabs; less wherever it fell.

    :raises EntryTooLarge: the process may have no more
    """
    try:
        if nbytes <= _SMALL_NBYTES:  # far cheaper to make and to free
            return memoryview(bytearray(nbytes))
        # torch's begins there too, and costs ten times as much.
        memory = numpy.empty(nbytes + ALIGNMENT_NBYTES - 1, numpy.uint8).data
    except MemoryError as exc:
        raise no_memory(nbytes) from exc
    start = -ctypes.addressof(ctypes.c_char.from_buffer(memory)) % ALIGNMENT_NBYTES
    return memory[start : start + nbytes]
