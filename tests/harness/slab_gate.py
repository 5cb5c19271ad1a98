"""Host memory that the system gives, or refuses, when a test says so."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable

import pytest

__all__ = ("SlabGate",)


class SlabGate:
    """Holds up whoever allocates a slab until it is opened, or refuses it then."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.refuses = False
        self.is_open = threading.Event()
        self.asked = threading.Event()
        self._allocate: Callable[[int, int, int], None] = os.posix_fallocate
        monkeypatch.setattr(os, "posix_fallocate", self)

    def __call__(self, fd: int, start: int, nbytes: int) -> None:
        self.asked.set()
        self.is_open.wait(10)
        if self.refuses:
            raise OSError(errno.ENOMEM, "no memory")
        self._allocate(fd, start, nbytes)
