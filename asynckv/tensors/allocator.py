"""Which pages of a range are whose: placement alone, no memory, no waiting.

The lowest address that fits, with neighbours joined as they are freed: of what
was tried on entries that come whole and leave in any order, this kept most of the
range usable. Small blocks are taken from the other end, so that they do not cut up
the room of large ones. What fits nowhere in one piece can be taken in several.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, TypeAlias

__all__ = ("PageAllocator", "Run")

Run: TypeAlias = tuple[int, int]
"""The first of some pages that lie together, and their number."""

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
                if left > self.largest_free and max_runs == 1:
                    break
                count = min(left, self.largest_free)
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
    class_ = _class_of(pages)
    shift = max(0, pages.bit_length() - 4)
    return class_ if pages == pages >> shift << shift else class_ + 1
