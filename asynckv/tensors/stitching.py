"""Pages of a file, mapped one after the other wherever they lie in it.

By ctypes, because :mod:`mmap` cannot put a mapping at an address.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import os
from collections.abc import Iterable
from typing import Any, Final, TypeAlias

import numpy
import numpy.typing

__all__ = ("drop", "map_again", "stitch")

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
