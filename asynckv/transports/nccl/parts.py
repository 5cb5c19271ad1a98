"""The parts that an NCCL transport moves, where they lie in memory of its GPU."""

from __future__ import annotations

import logging
from typing import Final

from asynckv.tensors.cuda import DeviceMemory
from asynckv.transports.parts import DoneCallback

__all__ = ("DevicePart",)

logger = logging.getLogger(__name__)

_NOTHING: Final = DeviceMemory(0, 0, 0)


class DevicePart:
    """One tensor on its way: its memory, how much of it has moved, whom to tell.

    ``begun_bytes`` are offered or granted, ``moved_bytes`` done. NCCL makes no digest,
    so none is told. On the loop only.
    """

    def __init__(
        self, transfer: int, number: int, memory: DeviceMemory, done: DoneCallback
    ) -> None:
        self.transfer = transfer
        self.number = number
        self.nbytes = memory.nbytes
        self.begun_bytes = 0
        self.moved_bytes = 0
        self.operations = 0
        """How many are under way."""
        self.posted = 0
        """How many of them the worker has."""
        self.is_skipped = False
        self.is_over = False
        """Whether somebody was told, or nobody wants to be."""
        self._memory = memory
        self._done = done

    @property
    def left_bytes(self) -> int:
        """Bytes that nobody has begun to move."""
        return self.nbytes - self.begun_bytes

    def begin(self, nbytes: int) -> DeviceMemory:
        """Return the next ``nbytes``, for an operation that keeps them."""
        start = self.begun_bytes
        self.begun_bytes += nbytes
        self.operations += 1
        return self._memory.part(start, self.begun_bytes)

    def stop(self) -> None:
        """Tell nobody, and begin nothing more of it."""
        self.is_over = True
        self._memory = _NOTHING

    def tell(self, error: BaseException | None = None) -> None:
        """Call ``done``, unless it was stopped. Once."""
        if self.is_over:
            return
        self.stop()
        try:
            self._done(b"", error)
        except Exception:  # of whoever waits for this part: the others still hear
            logger.exception("a payload's completion callback failed")
