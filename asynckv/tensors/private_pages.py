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
import numpy.typing

from asynckv.tensors.stitching import drop, map_again, stitch

__all__ = ("Claim", "PrivatePages")

_PAGE: Final = mmap.PAGESIZE
_ENTRY_NBYTES: Final = 8
_HIGHEST: Final = _ENTRY_NBYTES - 1 if sys.byteorder == "little" else 0
_IS_HERE: Final = 0xC0
"""Present, or swapped out."""
_IS_OF_FILE: Final = 0x20
_ARE_COPIES: Final = bytes(
    bool(byte & _IS_HERE) and not byte & _IS_OF_FILE for byte in range(256)
)
"""For each highest byte of an entry of the page map: is the page a copy?"""

_Bytes: TypeAlias = numpy.typing.NDArray[numpy.uint8]
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
    """Who has which page of one private mapping of ``fd``, which is ``memory``.

    :raises OSError: it cannot be mapped
    """

    def __init__(self, fd: int, nbytes: int) -> None:
        self._fd = fd
        runs = [(0, _PAGE), (0, nbytes)]
        mapping = stitch(fd, runs, writable=True, is_private=True)
        self._probe = _Probe(mapping[:_PAGE])
        self.memory: _Bytes = mapping[_PAGE:]
        self._address: int = self.memory.ctypes.data
        self._is_claimed = bytearray(nbytes // _PAGE)
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
        claim = Claim([*dict.fromkeys(runs)])  # small tensors share theirs
        pages = [(start // _PAGE, nbytes // _PAGE) for start, nbytes in claim.runs]
        is_claimed = self._is_claimed
        for first, count in pages:
            if is_claimed.find(1, first, first + count) >= 0:
                return None
        if self._probe.is_copied():
            return None
        for first, count in pages:
            is_claimed[first : first + count] = b"\1" * count
        return claim

    def release(self, claim: Claim) -> None:
        """Drop what was written, and let others claim the pages. In any thread.

        Pages where that cannot be done are claimed for ever.
        """
        if self._fd < 0:
            return
        over = [run for run in _joined(claim.shown) if self._restore(*run)]
        over += {*claim.runs}.difference(claim.shown)
        for start, nbytes in over:
            first, count = start // _PAGE, nbytes // _PAGE
            self._is_claimed[first : first + count] = bytes(count)

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
        are_copies = data[_HIGHEST::_ENTRY_NBYTES].translate(_ARE_COPIES)
        start, end = are_copies.find(1), are_copies.rfind(1) + 1
        if not end:
            return None
        return offset + start * _PAGE, (end - start) * _PAGE


def _joined(runs: Iterable[_Run]) -> list[_Run]:
    """Return them in order, neighbours as one."""
    joined: list[_Run] = []
    for start, nbytes in sorted(runs):
        if joined and sum(joined[-1]) == start:
            start, nbytes = joined[-1][0], joined.pop()[1] + nbytes
        joined.append((start, nbytes))
    return joined


class _Probe:
    """Tells whether somebody has made copies of a mapping, or is about to.

    ``mlockall`` does, of all that is private and may be written, from the first
    address to the last. So ``page``, which lies before the mapping, is copied first:
    then it shows no more what is written to its file, which is ours.
    """

    def __init__(self, page: _Bytes) -> None:
        fd = os.memfd_create("asynckv-probe", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, _PAGE)
            self._file = stitch(fd, [(0, _PAGE)], writable=True).data
            map_again(fd, 0, page.ctypes.data, _PAGE)
        finally:
            os.close(fd)
        self._page = page.data
        self._has_been = False

    def is_copied(self) -> bool:
        """Is it, or was it once? It says so no later than the first page is copied."""
        if not self._has_been:
            self._file[0] ^= 1
            self._has_been = self._page[0] != self._file[0]
        return self._has_been
