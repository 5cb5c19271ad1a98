"""A system whose disk does what it is told to: full, broken, slow, or by halves."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import TypeAlias

from asynckv.stores.disk import DiskTier
from asynckv.stores.disk.calls import FileCalls

__all__ = ("FaultyCalls", "OpenDisk")

OpenDisk: TypeAlias = Callable[..., AbstractAsyncContextManager[DiskTier]]
"""Opens tiers in one folder, one after the other."""


class FaultyCalls(FileCalls):
    """The system, but for what a test has asked it to do wrong.

    ``read_error``, ``write_error`` and ``allocate_error`` are errors (``errno.EIO``)
    that such calls fail with; ``most_nbytes`` is as much as one of them moves. While
    ``hangs`` is not 0, so many reads do not return before :meth:`let_go`.
    """

    def __init__(self, *, refuses_direct: bool = False) -> None:
        self.refuses_direct = refuses_direct
        self.read_error = self.write_error = self.allocate_error = 0
        self.room_nbytes: int | None = None
        self.most_nbytes: int | None = None
        self.hangs = 0
        self._lock = threading.Lock()
        self._may_go_on = threading.Event()

    def let_go(self) -> None:
        """Let what hangs go on."""
        self._may_go_on.set()

    def open(self, path: str, *, is_direct: bool) -> int:
        if is_direct and self.refuses_direct:
            raise OSError(errno.EINVAL, "no direct I/O here")
        return super().open(path, is_direct=is_direct)

    def allocate(self, fd: int, nbytes: int) -> None:
        if self.allocate_error:
            raise OSError(self.allocate_error, "told to")
        if self.room_nbytes is not None and nbytes > self.room_nbytes:
            raise OSError(errno.ENOSPC, "told to")
        super().allocate(fd, nbytes)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        with self._lock:
            must_hang = self.hangs > 0
            self.hangs -= must_hang
        if must_hang:
            self._may_go_on.wait()
        if self.read_error:
            raise OSError(self.read_error, "told to")
        return super().preadv(fd, self._cut(buffers), offset)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if self.write_error:
            raise OSError(self.write_error, "told to")
        return super().pwritev(fd, self._cut(buffers), offset)

    def _cut(self, buffers: Sequence[memoryview]) -> Sequence[memoryview]:
        if self.most_nbytes is None:
            return buffers
        return [buffers[0][: self.most_nbytes]]
