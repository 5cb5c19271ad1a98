"""What a worker allocates and frees, put off while operations wait for a peer."""

from __future__ import annotations

import collections
import time
from collections.abc import Callable

from asynckv.tensors.quiet_gpus import PATIENCE_S, QuietGpu

__all__ = ("QuietWork",)


class QuietWork:
    """Commands of one worker, in its thread, which must not stand still for that.

    Its operations are those that all others of the process wait for as well.
    """

    def __init__(self, gpu: QuietGpu) -> None:
        self._gpu = gpu
        self._operations = 0
        self._commands: collections.deque[tuple[float, Callable[[], None]]] = (
            collections.deque()
        )

    def begin_operation(self) -> None:
        """One is to be posted. Waits for who allocates elsewhere."""
        self._gpu.begin_operation()
        self._operations += 1

    def end_operation(self) -> None:
        """One waits for nobody any more."""
        self._operations -= 1
        self._gpu.end_operation()

    def add(self, command: Callable[[], None]) -> None:
        """Call ``command()`` in :meth:`run`, when none is under way, or after 5 s."""
        self._commands.append((time.monotonic() + PATIENCE_S, command))

    def run(self) -> None:
        """Do what may be done now."""
        while self._commands:
            until, command = self._commands[0]
            if self._operations and time.monotonic() < until:
                return
            self._commands.popleft()
            with self._gpu.allocating(0):
                command()
