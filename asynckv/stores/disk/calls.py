"""What a disk tier asks of the system: one seam, where tests put their faults.

Every call may block, for ever too: they are made in the tier's own threads.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import struct
from collections.abc import Callable, Sequence
from typing import Final

__all__ = ("PAGE_NBYTES", "FileCalls")

PAGE_NBYTES: Final = 4096
"""What slots are made of: a multiple of what O_DIRECT asks of nearly every disk."""

_O_DIRECT: Final[int] = getattr(os, "O_DIRECT", 0)
_STATX_DIOALIGN: Final = 0x2000
_AT_EMPTY_PATH: Final = 0x1000
_STATX_NBYTES: Final = 256
_MASK: Final = struct.Struct("I")
_ALIGNMENTS: Final = struct.Struct("II")
_ALIGNMENTS_AT: Final = 0x98


class FileCalls:
    """The system itself."""

    def open(self, path: str, *, is_direct: bool) -> int:
        """Open a file for reading and writing, made if it is not there.

        :raises OSError: it cannot be, or (EINVAL) not for direct I/O
        """
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        if is_direct and not _O_DIRECT:
            raise OSError(errno.EINVAL, "no direct I/O on this system")
        return os.open(path, flags | (_O_DIRECT if is_direct else 0), 0o600)

    def alignment(self, fd: int) -> int | None:
        """Return what direct I/O asks of memory, offsets and lengths; 0 for none.

        ``None``: an old kernel does not say.
        """
        statx = getattr(ctypes.CDLL(None), "statx", None)
        found = ctypes.create_string_buffer(_STATX_NBYTES)
        if statx is None or statx(fd, b"", _AT_EMPTY_PATH, _STATX_DIOALIGN, found):
            return None
        (mask,) = _MASK.unpack_from(found)
        if not mask & _STATX_DIOALIGN:
            return None
        memory, offset = _ALIGNMENTS.unpack_from(found, _ALIGNMENTS_AT)
        return max(memory, offset) if memory and offset else 0

    def lock(self, fd: int) -> None:
        """Have the file alone, until it is closed.

        :raises BlockingIOError: somebody else has it
        """
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def unlock(self, fd: int) -> None:
        """Let others have it, though a child of this process has it open too."""
        with contextlib.suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_UN)

    def allocate(self, fd: int, nbytes: int) -> None:
        """Give the file so many bytes on the disk."""
        os.posix_fallocate(fd, 0, nbytes)

    # Called for each of millions of slots: nothing is to stand in between.
    preadv: Callable[[int, Sequence[memoryview], int], int] = staticmethod(os.preadv)
    """Fill the buffers from an offset on; return how many bytes came."""

    pwritev: Callable[[int, Sequence[memoryview], int], int] = staticmethod(os.pwritev)
    """Write the buffers from an offset on; return how many bytes went."""
