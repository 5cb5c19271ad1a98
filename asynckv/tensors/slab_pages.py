"""Which regions have which pages of the slabs, and when there is to be one more.

Rule of this file: everything but :meth:`SlabPages.make_slab`, and what it calls,
runs on one thread.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

import numpy
import numpy.typing

from asynckv.tensors.allocator import PageAllocator
from asynckv.tensors.arena import Pages, pack, pages_of
from asynckv.tensors.slabs import PAGE_NBYTES, IdleSlabs, Slabs, next_slab_nbytes

__all__ = ("PagesOnDemand", "Place", "SlabPages")

_MAX_RUNS: Final = 64
_MAX_STITCHED_RUNS: Final = 8192
"""Places that one block may be in, and those that may be mapped for such blocks: a
process may have 65,530 mappings."""

_Bytes: TypeAlias = numpy.typing.NDArray[numpy.uint8]

Place: TypeAlias = tuple[Pages, int]
"""Some pages, and the offset of one tensor in them."""


class PagesOnDemand:
    """Pages of up to ``max_bytes``; ``wanted`` is called when there should be more."""

    def __init__(self, max_bytes: int, wanted: Callable[[], None]) -> None:
        self._max_pages = pages_of(max_bytes)
        self._wanted = wanted
        self._allocator = PageAllocator()
        self._is_closed = False
        self.is_usable = max_bytes > 0
        """Can there be any?"""

    @property
    def nbytes(self) -> int:
        """What was allocated for regions."""
        return self._allocator.pages * PAGE_NBYTES

    @property
    def free_bytes(self) -> int:
        """What no region has of that."""
        return self._allocator.free_pages * PAGE_NBYTES

    @property
    def is_growing(self) -> bool:
        """Are there pages that were not allocated yet?"""
        return self.is_usable and self._allocator.pages < self._max_pages


class SlabPages(PagesOnDemand):
    """The pages of all slabs there are, of up to ``max_bytes``.

    ``wanted`` is called when a slab is needed: :meth:`make_slab`, in a thread, then
    :meth:`add_slab` are to follow.

    What fits nowhere in one piece, once all slabs are there, lies in several, which
    are mapped together for those alone who need them so.
    """

    def __init__(self, max_bytes: int, wanted: Callable[[], None]) -> None:
        super().__init__(max_bytes, wanted)
        self._max_bytes = max_bytes
        self._slabs: Slabs | None = None
        self._opening = threading.Lock()
        self._stitched_runs = 0

    def could_ever_fit(self, sizes: Sequence[int]) -> bool:
        """Is there room for tensors of these sizes, when all slabs are there?"""
        if sum(sizes) // PAGE_NBYTES + len(sizes) <= self._max_pages:
            return True  # however they share pages
        return sum(pack(sizes)[0]) <= self._max_pages

    def fits(self, sizes: Sequence[int]) -> bool:
        """Would :meth:`take` have pages for tensors of these sizes now?"""
        return self._allocator.fits(pack(sizes)[0], max_runs=self._max_runs)

    def take(self, sizes: Sequence[int]) -> list[Place] | None:
        """Take pages for tensors of these sizes, all or none, and map nothing."""
        blocks, places = pack(sizes)
        taken = self._allocator.allocate(blocks, max_runs=self._max_runs)
        if taken is None:
            return None
        self._stitched_runs += sum(len(runs) for runs in taken if len(runs) > 1)
        pages = [Pages(runs) for runs in taken]
        return [(pages[block], offset) for block, offset in places]

    def free(self, pages: Pages) -> None:
        """Give pages back that no region has any more."""
        pages.memory = None
        if len(pages.runs) > 1:
            self._stitched_runs -= len(pages.runs)
        for run in pages.runs:
            self._allocator.free(*run)

    def memory_of(self, pages: Pages | None, *, writable: bool) -> _Bytes:
        """Return pages that :meth:`take` has returned, in one piece.

        :raises RuntimeError: the slabs were unmapped
        :raises OSError: they lie apart, and the process may have no more mappings
        """
        slabs = self._slabs
        if pages is None or slabs is None:
            raise RuntimeError("a region outlived the slabs of its arena")
        if not writable or len(pages.runs) < 2:
            return slabs.of_runs(pages.runs, writable=writable)
        if pages.memory is None:
            pages.memory = slabs.of_runs(pages.runs, writable=True)
        return pages.memory

    def spans_of(
        self, pages: Pages | None, offset: int, nbytes: int
    ) -> tuple[_Bytes, list[tuple[int, int]]]:
        """Return all memory, and where some bytes of ``pages`` begin and end in it.

        :raises RuntimeError: the slabs were unmapped
        """
        slabs = self._slabs
        if pages is None or slabs is None:
            raise RuntimeError("a region outlived the slabs of its arena")
        spans: list[tuple[int, int]] = []
        for first, count in pages.runs:
            length = count * PAGE_NBYTES
            if offset < length and nbytes:
                start, some = first * PAGE_NBYTES + offset, min(length - offset, nbytes)
                spans.append((start, start + some))
                nbytes -= some
            offset -= min(offset, length)
        return slabs.memory, spans

    def want(self) -> None:
        """Ask for a slab, if there can be one more."""
        if self.is_growing and not self._is_closed:
            self._wanted()

    def make_slab(self) -> int | None:
        """Allocate the next slab; return its bytes, ``None`` for no shared memory.

        Blocks: to be called in a thread, by one at a time.
        """
        slabs = self.open_slabs()
        return None if slabs is None else slabs.grow()

    def open_slabs(self) -> Slabs | None:
        """Return the memory file, made now if there is none; ``None`` if none can be.

        Called in any thread.
        """
        with self._opening:
            if self._slabs is None and self.is_usable and not self._is_closed:
                with contextlib.suppress(OSError, OverflowError, ValueError):
                    self._slabs = Slabs(self._max_bytes)
            return self._slabs

    def add_slab(self, nbytes: int | None) -> bool:
        """Use what :meth:`make_slab` has returned; ``False`` if it is too little.

        There will be no other slab then.
        """
        if nbytes is None:
            self.is_usable = False
            return False
        asked = next_slab_nbytes(self.nbytes, self._max_pages * PAGE_NBYTES)
        if nbytes:
            self._allocator.extend(nbytes // PAGE_NBYTES)
        if nbytes < asked:
            self._max_pages = self._allocator.pages
        return nbytes >= asked

    def close(self) -> None:
        """Get no more slabs. What is mapped stays so until :meth:`unmap`."""
        self._is_closed = True
        if self._slabs is not None:
            self._slabs.close()

    def unmap(self) -> IdleSlabs | None:
        """Let the slabs go, but for what somebody has a view of; return them once."""
        slabs, self._slabs = self._slabs, None
        if slabs is None:
            return None
        return IdleSlabs(slabs, list(self._allocator.free_blocks()))

    @property
    def _max_runs(self) -> int:
        is_for_one = self.is_growing or self._stitched_runs >= _MAX_STITCHED_RUNS
        return 1 if is_for_one else _MAX_RUNS
