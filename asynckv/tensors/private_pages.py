"""Pages of a peer's memory file, as one process may write them: to itself alone.

A page that was written is a copy, which shows no more what the owner writes there. So
each page serves one delivery at a time, and what that has written is dropped before
the owner is told that the delivery is over.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import sys
from collections.abc import Iterable
from typing import Final, TypeAlias

import numpy

from asynckv.tensors.stitching import drop, map_again

__all__ = ("Claim", "PrivatePages")

_PAGE: Final = mmap.PAGESIZE
_ENTRY_NBYTES: Final = 8
_IS_HERE: Final = 3 << 62
"""Present, or swapped out."""
_IS_OF_FILE: Final = 1 << 61
_KIND: Final = numpy.uint64(_IS_HERE | _IS_OF_FILE)

_Run: TypeAlias = tuple[int, int]
"""Offset and bytes of whole pages."""


class Claim:
    """The pages of one delivery, and those of them that it may write."""

    __slots__ = ("runs", "shown")

    def __init__(self, runs: list[_Run]) -> None:
        self.runs = runs
        self.shown: list[_Run] = []

    @property
    def shown_nbytes(self) -> int:
        return sum(nbytes for _, nbytes in self.shown)


class PrivatePages:
    """Who has which page of one private mapping of ``fd``, at ``address``.

    The last page is claimed by nobody: it tells whether somebody has made copies of
    all of them (``mlockall`` does, from the first to the last), or is about to.
    """

    def __init__(self, fd: int, address: int, nbytes: int) -> None:
        self._fd = fd
        self._address = address
        self._nbytes = nbytes
        self._is_claimed = numpy.zeros(nbytes // _PAGE, numpy.bool_)
        self._pagemap = -1
        with contextlib.suppress(OSError):
            self._pagemap = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)

    def close(self) -> None:
        """Serve nobody any more. What was claimed stays as it is."""
        self._fd = -1
        pagemap, self._pagemap = self._pagemap, -1
        if pagemap >= 0:
            os.close(pagemap)

    def claim(self, runs: Iterable[_Run]) -> Claim | None:
        """Return the pages for one delivery; ``None`` if they are to be mapped anew."""
        runs = list(runs)
        pages = [_slice_of(run) for run in runs]
        if any(self._is_claimed[each].any() for each in pages) or self._has_copies():
            return None
        for each in pages:
            self._is_claimed[each] = True
        return Claim(runs)

    def release(self, claim: Claim) -> None:
        """Drop what was written, and let others claim the pages. In any thread.

        Pages where that cannot be done are claimed for ever.
        """
        if self._fd < 0:
            return
        kept = [run for run in claim.shown if not self._restore(*run)]
        for run in claim.runs:
            if run not in kept:
                self._is_claimed[_slice_of(run)] = False

    def _has_copies(self) -> bool:
        last = self._address + self._nbytes - _PAGE
        try:
            data = os.pread(self._pagemap, _ENTRY_NBYTES, last // _PAGE * _ENTRY_NBYTES)
        except OSError:
            return not drop(last, _PAGE)
        entry = int.from_bytes(data, sys.byteorder)
        is_copy = bool(entry & _IS_HERE and not entry & _IS_OF_FILE)
        return is_copy or not drop(last, _PAGE)  # which the kernel refuses if locked

    def _restore(self, offset: int, nbytes: int) -> bool:
        """Show the owner's bytes there again; false if that cannot be done."""
        try:
            try:
                written = self._written(offset, nbytes)
            except OSError:
                written = offset, nbytes
            else:
                if written is None or drop(self._address + written[0], written[1]):
                    return True
            map_again(self._fd, written[0], self._address + written[0], written[1])
        except OSError:
            return False
        return True

    def _written(self, offset: int, nbytes: int) -> _Run | None:
        """Return a run that holds all pages there that are copies.

        :raises OSError: that cannot be told
        """
        first = (self._address + offset) // _PAGE
        size = nbytes // _PAGE * _ENTRY_NBYTES
        data = os.pread(self._pagemap, size, first * _ENTRY_NBYTES)
        if len(data) != size:
            raise OSError("the page map ends")
        entries = numpy.frombuffer(data, numpy.uint64)
        kinds = entries & _KIND
        copies = numpy.flatnonzero((kinds != 0) & (kinds & _IS_OF_FILE == 0))
        if not len(copies):
            return None
        start, end = int(copies[0]), int(copies[-1]) + 1
        return offset + start * _PAGE, (end - start) * _PAGE


def _slice_of(run: _Run) -> slice:
    offset, nbytes = run
    return slice(offset // _PAGE, (offset + nbytes) // _PAGE)
