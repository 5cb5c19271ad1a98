"""When memory of a GPU is allocated and freed: while nothing there waits for a peer.

CUDA may keep whoever does either waiting for all that the GPU was given, and others of
the process with it. If that waits for a peer, which does the same, neither gets on.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator
from typing import Final

from asynckv.devices.cuda import CudaApi

__all__ = ("PATIENCE_S", "GpuAccess", "gpu_access")

PATIENCE_S: Final = 5.0
"""So long it is waited for; then memory is allocated, or freed, all the same."""


class GpuAccess:
    """Who is at one GPU: operations that wait for peers, or who allocates."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._operations = 0
        self._allocating = 0

    def begin_operation(self) -> None:
        """One is to be posted. Waits for who allocates, which does not take long."""
        with self._changed:
            self._changed.wait_for(lambda: not self._allocating, PATIENCE_S)
            self._operations += 1

    def end_operation(self) -> None:
        """One waits for nobody any more."""
        with self._changed:
            self._operations -= 1
            self._changed.notify_all()

    @contextlib.contextmanager
    def allocating(self, patience_s: float = PATIENCE_S) -> Iterator[None]:
        """Allocate, or free, within this. Blocks: not for an event loop.

        No operation is posted meanwhile, unless one was waited for in vain: its peer
        may wait for the next one.
        """
        with self._changed:
            if is_quiet := self._changed.wait_for(self._is_quiet, patience_s):
                self._allocating += 1
        try:
            yield
        finally:
            if is_quiet:
                with self._changed:
                    self._allocating -= 1
                    self._changed.notify_all()

    def _is_quiet(self) -> bool:
        return not self._operations


# Mutable and global, because what CUDA waits for is the whole process's.
_of_cuda: Final[weakref.WeakKeyDictionary[CudaApi, dict[int, GpuAccess]]] = (
    weakref.WeakKeyDictionary()
)
_lock: Final = threading.Lock()


def gpu_access(cuda: CudaApi, device: int) -> GpuAccess:
    """Return the one of a GPU, the same for all who ask."""
    with _lock:
        return _of_cuda.setdefault(cuda, {}).setdefault(device, GpuAccess())
