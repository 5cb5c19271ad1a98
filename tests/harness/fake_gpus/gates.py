"""Work that lasts for as long as a test wants it to."""

from __future__ import annotations

import threading

from asynckv.errors import GPUFailed

__all__ = ("Gate",)


class Gate:
    """Work of a stream that ends when it is opened, or fails: all behind it waits."""

    def __init__(self) -> None:
        self._is_open = threading.Event()
        self._error: GPUFailed | None = None

    def open(self) -> None:
        """Let it end."""
        self._is_open.set()

    def fail(self, error: GPUFailed) -> None:
        """Let it fail, and so all that is behind it."""
        self._error = error

    def run(self) -> bool:
        if self._error is not None:
            raise self._error
        return self._is_open.is_set()
