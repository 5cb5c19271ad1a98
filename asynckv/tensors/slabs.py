"""Shared memory that grows slab by slab: a memfd, mapped whole, allocated in parts.

The file has its final size from the start, sealed, so that nothing can cut it
under a mapping; a region may lie across slabs. Only what :meth:`Slabs.grow` has
returned may be touched: the rest has no pages yet. Pages that do not lie together
are mapped once more, one after the other. The last page, beyond all slabs, is for
those who share the file.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import threading
from collections.abc import Sequence
from typing import Final, TypeAlias

import numpy
import numpy.typing

from asynckv.affinity import ProcessBound
from asynckv.tensors.stitching import stitch

__all__ = (
    "MAX_SLAB_NBYTES",
    "MIN_SLAB_NBYTES",
    "PAGE_NBYTES",
    "IdleSlabs",
    "Run",
    "Slabs",
    "has_slabs",
    "next_slab_nbytes",
)

PAGE_NBYTES: Final = mmap.PAGESIZE
MAX_SLAB_NBYTES: Final = 256 * 2**20
MIN_SLAB_NBYTES: Final = 16 * 2**20
_LEAST_NBYTES: Final = 2**20
"""Where a whole slab cannot be had, halves of it are tried down to this."""

_PIECE_NBYTES: Final = 16 * 2**20
"""A thread that allocates a slab asks whether to go on after as much."""

_MADV_REMOVE: Final = 9
_MADV_POPULATE_WRITE: Final = 23
_NORESERVE: Final[int] = getattr(mmap, "MAP_NORESERVE", 0)

Run: TypeAlias = tuple[int, int]
"""The first of some pages that lie together, and their number."""

_Bytes: TypeAlias = numpy.typing.NDArray[numpy.uint8]


def has_slabs() -> bool:
    """Does this system have memory files?"""
    return hasattr(os, "memfd_create") and hasattr(fcntl, "F_ADD_SEALS")


def next_slab_nbytes(nbytes: int, max_bytes: int) -> int:
    """How large is the slab after ``nbytes``: as much again, within limits."""
    wanted = min(max(nbytes, MIN_SLAB_NBYTES), MAX_SLAB_NBYTES)
    return min(wanted, max_bytes - nbytes)


class Slabs(ProcessBound):
    """One memory file of ``max_bytes`` (rounded up to pages), none of it there yet.

    ``memory`` is the mapping, also for writing. It is unmapped when the last
    view of it is gone, whatever was closed before. A forked child shares the file, so
    there it is neither allocated nor cleared.

    :raises OSError: the system has no file descriptor or no address range for it
    """

    def __init__(self, max_bytes: int) -> None:
        self._own()
        self.max_bytes = -(-max_bytes // PAGE_NBYTES) * PAGE_NBYTES
        self.nbytes = 0
        """What can be touched. :meth:`grow` adds to it, from a thread."""
        self._lock = threading.Lock()
        self._is_closed = self._is_growing = False
        self._fd = os.memfd_create("asynckv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self.file_nbytes = self.max_bytes + PAGE_NBYTES
        os.ftruncate(self._fd, self.file_nbytes)
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, seals)
        self.memory = self._map(mmap.PROT_READ | mmap.PROT_WRITE)
        self._constant: _Bytes | None = None

    def __del__(self) -> None:
        # No lock: nobody else has it, and a finalizer may run in any thread.
        if hasattr(self, "_fd"):
            self._close_file()

    def fileno(self) -> int:
        """Return the file's descriptor. It is open until :meth:`close`."""
        return self._fd

    @property
    def constant(self) -> _Bytes:
        """The same memory, mapped for reading only: writing to it is a crash."""
        if self._constant is None:
            self._constant = self._map(mmap.PROT_READ)
        return self._constant

    def stitched(self, runs: Sequence[Run], *, writable: bool) -> _Bytes:
        """Return the memory of pages that do not lie together, one after the other.

        :raises OSError: the process may have no more mappings
        """
        spans = [(first * PAGE_NBYTES, pages * PAGE_NBYTES) for first, pages in runs]
        return stitch(self._fd, spans, writable=writable)

    def grow(self) -> int:
        """Allocate the next slab, or what can be had of it; return its bytes.

        Blocks for as long as the system needs to clear the pages, without the
        GIL: to be called in a thread, by one at a time.
        """
        if self._is_copy:
            return 0
        with self._lock:
            self._is_growing = True
        try:
            return self._grow()
        finally:
            with self._lock:
                self._is_growing = False
                if self._is_closed:
                    self._close_file()

    def close(self) -> None:
        """Close the file and let a thread in :meth:`grow` end soon. Never waits."""
        if self._is_copy:  # and so is the lock, which a thread may have had
            self._close_file()
            return
        with self._lock:
            self._is_closed = True
            if not self._is_growing:  # else its number may be another file's there
                self._close_file()

    def clear(self, runs: Sequence[Run]) -> None:
        """Give pages back to the system, which shows zeros there from now on.

        Blocks for as long as that takes, without the GIL: to be called in a thread.
        """
        if self._is_copy:
            return
        for first, pages in runs:
            start = first * PAGE_NBYTES
            _advise(self.memory[start : start + pages * PAGE_NBYTES], _MADV_REMOVE)

    def _grow(self) -> int:
        nbytes = next_slab_nbytes(self.nbytes, self.max_bytes)
        while nbytes and not self._is_closed:
            try:
                self._allocate(nbytes)
            except OSError:  # no memory, or more than this process may have
                nbytes = _half(nbytes)
            else:
                self.nbytes += nbytes
                return nbytes
        return 0

    def _close_file(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _allocate(self, nbytes: int) -> None:
        end = self.nbytes + nbytes
        for start in range(self.nbytes, end, _PIECE_NBYTES):
            if self._is_closed:
                raise OSError("closed meanwhile")
            piece = self.memory[start : min(start + _PIECE_NBYTES, end)]
            os.posix_fallocate(self._fd, start, piece.nbytes)
            _populate(piece)

    def _map(self, protection: int) -> _Bytes:
        # Never closed by hand: numpy keeps it until the last view is gone.
        mapping = mmap.mmap(
            self._fd, self.file_nbytes, mmap.MAP_SHARED | _NORESERVE, protection
        )
        with contextlib.suppress(AttributeError, OSError):  # no use in a core dump
            mapping.madvise(mmap.MADV_DONTDUMP, 0, self.file_nbytes)
        return numpy.frombuffer(mapping, numpy.uint8)


class IdleSlabs:
    """Slabs that nobody needs any more, but for those who have views."""

    def __init__(self, slabs: Slabs, idle: Sequence[Run]) -> None:
        self._slabs: Slabs | None = slabs
        self._idle = idle

    def drop(self) -> None:
        """Give the idle pages back, and with the last view the others. Once.

        Blocks for as long as the system needs to clear them, without the GIL: to be
        called in a thread, by which the mapping is closed too.
        """
        slabs, self._slabs = self._slabs, None
        if slabs is not None:
            slabs.clear(self._idle)


def _half(nbytes: int) -> int:
    """Return half as many bytes, in whole pages; 0 where that is too few."""
    half = nbytes // 2 // PAGE_NBYTES * PAGE_NBYTES
    return half if half >= _LEAST_NBYTES else 0


def _populate(piece: _Bytes) -> None:
    """Map pages that are there already, so that the first write does not fault.

    By ctypes, which lets the GIL go where :meth:`mmap.mmap.madvise` keeps it. An
    old kernel refuses; then each first write to a page costs a fault.
    """
    _advise(piece, _MADV_POPULATE_WRITE)


def _advise(piece: _Bytes, advice: int) -> None:
    libc = ctypes.CDLL(None)
    address = ctypes.c_void_p(piece.ctypes.data)
    libc.madvise(address, ctypes.c_size_t(piece.nbytes), advice)
