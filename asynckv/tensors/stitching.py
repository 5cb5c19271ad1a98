"""Pages of a file, mapped one after the other wherever they lie in it.

By ctypes, because :mod:`mmap` cannot put a mapping at an address.

Pages of a peer's memory file may be written by one process to itself alone. A page that
was written is a copy, which shows no more what the owner writes there. So each page
serves one delivery at a time, and what that has written is dropped before the owner is
told that the delivery is over.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import os
import sys
from collections.abc import Iterable
from typing import Any, Final, TypeAlias

import numpy
import numpy.typing

__all__ = (
    "Claim",
    "PrivatePages",
    "drop",
    "map_again",
    "stitch",
)


_MAP_FIXED: Final = 0x10
_NORESERVE: Final[int] = getattr(mmap, "MAP_NORESERVE", 0x4000)
"""Without it a private mapping counts as memory in use: all of it, from the start.
Older versions of Python do not name it."""
_FAILED: Final = ctypes.c_void_p(-1).value

_Bytes: TypeAlias = numpy.typing.NDArray[numpy.uint8]


class _Mapping:
    """A range of addresses, unmapped when nothing is based on it any more."""

    __slots__ = ("__array_interface__", "_unmap", "address", "nbytes")

    def __init__(self, nbytes: int, *, writable: bool) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
        self.address = _map(None, nbytes, 0, flags, -1, 0)
        self.nbytes = nbytes
        self._unmap = _libc().munmap
        self.__array_interface__: dict[str, Any] = {
            "data": (self.address, not writable),
            "shape": (nbytes,),
            "typestr": "|u1",
            "version": 3,
        }

    def __del__(self) -> None:
        if hasattr(self, "_unmap"):
            self._unmap(self.address, self.nbytes)


def stitch(
    fd: int,
    runs: Iterable[tuple[int, int]],
    *,
    writable: bool,
    is_private: bool = False,
) -> _Bytes:
    """Return one array over ``runs``, offsets and bytes of whole pages of a file.

    It shares memory with every other mapping of the file, and is unmapped with the
    last array over it. Its first use costs a page fault a page. A write to one that
    ``is_private`` is seen by this array alone, and needs no right to write the file.

    :raises OSError: the process may have no more mappings, or has no addresses
    """
    runs = list(runs)
    mapping = _Mapping(sum(nbytes for _, nbytes in runs), writable=writable)
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    address = mapping.address
    for offset, nbytes in runs:
        if is_private:
            map_again(fd, offset, address, nbytes)
        else:
            _map(address, nbytes, protection, mmap.MAP_SHARED | _MAP_FIXED, fd, offset)
        address += nbytes
    with contextlib.suppress(AttributeError):  # no use in a core dump
        _libc().madvise(mapping.address, mapping.nbytes, mmap.MADV_DONTDUMP)
    return numpy.asarray(mapping)


def map_again(fd: int, offset: int, address: int, nbytes: int) -> None:
    """Map pages of a file at ``address``, for reading and private writing.

    What was mapped there is gone, and what was written there with it.

    :raises OSError: they cannot be mapped, or not for writing
    """
    # Not writable at once: if the process locks its memory (mlockall), the kernel
    # would copy all that is writable and private, and the copies would grow old.
    flags = mmap.MAP_PRIVATE | _MAP_FIXED | _NORESERVE
    _map(address, nbytes, mmap.PROT_READ, flags, fd, offset)
    libc = _libc()
    libc.munlock(address, nbytes)
    if libc.mprotect(address, nbytes, mmap.PROT_READ | mmap.PROT_WRITE):
        raise _error()
    if hasattr(mmap, "MADV_DONTDUMP"):  # no use in a core dump
        libc.madvise(address, nbytes, mmap.MADV_DONTDUMP)


def drop(address: int, nbytes: int) -> bool:
    """Drop what was written there; false if the kernel keeps it (it is locked)."""
    return not _libc().madvise(address, nbytes, mmap.MADV_DONTNEED)


def _map(
    address: int | None, nbytes: int, protection: int, flags: int, fd: int, offset: int
) -> int:
    mapped: int = _libc().mmap(address, nbytes, protection, flags, fd, offset)
    if mapped == _FAILED:
        raise _error()
    return mapped


def _error() -> OSError:
    code = ctypes.get_errno()
    return OSError(code, os.strerror(code))


@functools.cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    libc.mmap.restype = pointer
    libc.mmap.argtypes = (pointer, size, number, number, number, ctypes.c_long)
    libc.munmap.argtypes = (pointer, size)
    libc.madvise.argtypes = (pointer, size, number)
    libc.munlock.argtypes = (pointer, size)
    libc.mprotect.argtypes = (pointer, size, number)
    return libc


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

_Run: TypeAlias = tuple[int, int]
"""Offset and bytes of whole pages."""


class Claim:
    """The pages of one delivery, and those of them that it may write."""

    __slots__ = ("exported", "runs")

    def __init__(self, runs: list[_Run]) -> None:
        self.runs = runs
        self.exported: list[_Run] = []

    @property
    def exported_nbytes(self) -> int:
        return sum(nbytes for _, nbytes in self.exported)


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
        over = [run for run in _joined(claim.exported) if self._restore(*run)]
        over += {*claim.runs}.difference(claim.exported)
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
