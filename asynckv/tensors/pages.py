"""Which pages of an arena are whose: placement alone, and where they are mapped.

The lowest address that fits, with neighbours joined as they are freed: of what
was tried on entries that come whole and leave in any order, this kept most of the
range usable. Small blocks are taken from the other end, so that they do not cut up
the room of large ones. What fits nowhere in one piece can be taken in several.

Rule of this file: everything but :meth:`SlabPages.make_slab`, and what it calls,
runs on one thread.
"""

from __future__ import annotations

import bisect
import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, Protocol, TypeAlias

import numpy
import numpy.typing

from asynckv.tensors.slabs import PAGE_NBYTES, IdleSlabs, Run, Slabs, next_slab_nbytes

__all__ = (
    "ALIGNMENT_NBYTES",
    "SHARED_PAGES_BELOW",
    "ArenaPages",
    "IdlePages",
    "PageAllocator",
    "Pages",
    "PagesOnDemand",
    "Place",
    "SlabPages",
    "pack",
    "pages_of",
)

_Bytes: TypeAlias = numpy.typing.NDArray[numpy.uint8]

ALIGNMENT_NBYTES: Final = 64
"""Every tensor begins at a multiple of it."""

SHARED_PAGES_BELOW: Final = 64 * 1024
"""Smaller tensors of an entry share pages, which are free when the last has left."""

_PACKED_NBYTES: Final = 256 * 1024


def pack(sizes: Sequence[int]) -> tuple[list[int], list[tuple[int, int]]]:
    """Return blocks in pages, and for each size its block and the offset in that.

    Small tensors share blocks, aligned to 64 bytes; the others have one each.
    """
    blocks: list[int] = []
    places: list[tuple[int, int]] = []
    packed, filled = -1, 0
    for nbytes in sizes:
        if nbytes >= SHARED_PAGES_BELOW:
            places.append((len(blocks), 0))
            blocks.append(pages_of(nbytes))
            continue
        if packed < 0 or filled + nbytes > _PACKED_NBYTES:
            packed, filled = len(blocks), 0
            blocks.append(0)
        places.append((packed, filled))
        blocks[packed] = pages_of(filled + nbytes)
        filled += -(-nbytes // ALIGNMENT_NBYTES) * ALIGNMENT_NBYTES
    return blocks, places


def pages_of(nbytes: int) -> int:
    """Return how many pages so many bytes need."""
    return -(-nbytes // PAGE_NBYTES)


class Pages:
    """Pages that some regions of one entry share; free when the last has left."""

    __slots__ = ("left", "memory", "runs")

    def __init__(self, runs: Sequence[Run]) -> None:
        self.runs = runs
        self.memory: _Bytes | None = None
        """Where they are mapped in one piece, once somebody needs them so."""
        self.left = 0


_SMALL_PAGES: Final = 256
"""Blocks below it are placed from the top."""


class PageAllocator:
    """Blocks of pages in one range, which grows at its end.

    A block costs O(log n) comparisons of n free ones.
    """

    def __init__(self, pages: int = 0) -> None:
        self.pages = 0
        self.free_pages = 0
        self._count_of: dict[int, int] = {}
        self._first_of: dict[int, int] = {}
        """Of each free block: pages by first page, first page by end."""
        self._by_size: list[tuple[int, int]] = []
        self._by_class: dict[int, list[int]] = {}
        self._filled = 0
        """A bit for each class that has free blocks, by their first pages."""
        if pages:
            self.extend(pages)

    @property
    def largest_free(self) -> int:
        """Pages of the largest free block."""
        return self._by_size[-1][0] if self._by_size else 0

    def extend(self, pages: int) -> None:
        """Let the range grow at its end."""
        first = self.pages
        self.pages += pages
        self.free(first, pages)

    def fits(self, blocks: Sequence[int], *, max_runs: int = 1) -> bool:
        """Would :meth:`allocate` find room for blocks of so many pages now?"""
        total = sum(blocks)
        if total <= self.largest_free:
            return True  # whatever goes elsewhere leaves more of that block
        if total > self.free_pages:
            return False
        taken = self.allocate(blocks, max_runs=max_runs)
        if taken is None:
            return False
        self._free_all(taken)
        return True

    def allocate(
        self, blocks: Sequence[int], *, max_runs: int = 1
    ) -> list[list[Run]] | None:
        """Take a block of each number of pages, all or none; return the runs of each.

        That is one where some place is large enough, else up to ``max_runs`` of the
        largest there are. A block of no pages has none.
        """
        if sum(blocks) > self.free_pages:
            return None
        taken: list[list[Run]] = [[] for _ in blocks]
        order = sorted(range(len(blocks)), key=blocks.__getitem__, reverse=True)
        for index in order:
            left = blocks[index]
            while left and len(taken[index]) < max_runs:
                largest = self.largest_free
                if left > largest and max_runs == 1:
                    break
                count = min(left, largest)
                taken[index].append((self._take(count), count))
                left -= count
            if left:
                self._free_all(taken)
                return None
        return taken

    def free(self, first: int, pages: int) -> None:
        """Give a block back. It is joined with free neighbours at once."""
        self.free_pages += pages
        if not pages:
            return
        before = self._first_of.get(first)
        if before is not None:
            pages += self._remove(before)
            first = before
        if first + pages in self._count_of:
            pages += self._remove(first + pages)
        self._add(first, pages)

    def free_blocks(self) -> Iterator[tuple[int, int]]:
        """Yield first page and pages of every free block, from the bottom up."""
        yield from sorted(self._count_of.items())

    def _free_all(self, taken: Iterable[Iterable[Run]]) -> None:
        for runs in taken:
            for run in runs:
                self.free(*run)

    def _take(self, pages: int) -> int:
        """Take pages that lie together, no more than the largest block has."""
        from_top = pages < _SMALL_PAGES
        found = self._find(pages, from_top=from_top)
        count = self._remove(found)
        self.free_pages -= pages
        left = count - pages
        if not left:
            return found
        if from_top:
            self._add(found, left)
            return found + left
        self._add(found + pages, left)
        return found

    def _find(self, pages: int, *, from_top: bool) -> int:
        # Every block of these classes is large enough; of its own class, some are.
        classes = self._filled & (-1 << _class_that_holds(pages))
        best: int | None = None
        while classes:
            lowest = classes & -classes
            classes ^= lowest
            firsts = self._by_class[lowest.bit_length() - 1]
            first = firsts[-1] if from_top else firsts[0]
            if best is None or (first > best) is from_top:
                best = first
        if best is None:
            return self._by_size[bisect.bisect_left(self._by_size, (pages, 0))][1]
        return best

    def _add(self, first: int, pages: int) -> None:
        self._count_of[first] = pages
        self._first_of[first + pages] = first
        bisect.insort(self._by_size, (pages, first))
        class_ = _class_of(pages)
        bisect.insort(self._by_class.setdefault(class_, []), first)
        self._filled |= 1 << class_

    def _remove(self, first: int) -> int:
        pages = self._count_of.pop(first)
        del self._first_of[first + pages]
        del self._by_size[bisect.bisect_left(self._by_size, (pages, first))]
        class_ = _class_of(pages)
        firsts = self._by_class[class_]
        del firsts[bisect.bisect_left(firsts, first)]
        if not firsts:
            self._filled ^= 1 << class_
        return pages


def _class_of(pages: int) -> int:
    """Number sizes one by one below 16 pages, then in eighths of a power of two."""
    shift = max(0, pages.bit_length() - 4)
    return 8 * shift + (pages >> shift)


def _class_that_holds(pages: int) -> int:
    """Return the first class whose blocks all have so many pages."""
    shift = max(0, pages.bit_length() - 4)
    whole = pages >> shift
    return 8 * shift + whole + (pages != whole << shift)


_MAX_RUNS: Final = 64
_MAX_STITCHED_RUNS: Final = 8192
"""Places that one block may be in, and those that may be mapped for such blocks: a
process may have 65,530 mappings."""

Place: TypeAlias = tuple[Pages, int]
"""Some pages, and the offset of one tensor in them."""


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
        pages = list(map(Pages, taken))
        for runs in taken:
            if len(runs) > 1:
                self._stitched_runs += len(runs)
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
        if len(pages.runs) < 2:
            memory = slabs.memory if writable else slabs.constant
            first, count = pages.runs[0] if pages.runs else (0, 0)
            return memory[first * PAGE_NBYTES : (first + count) * PAGE_NBYTES]
        if not writable:
            return slabs.stitched(pages.runs, writable=False)
        if pages.memory is None:
            pages.memory = slabs.stitched(pages.runs, writable=True)
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
