"""The parts that an NCCL transport moves: in memory of the host, or of a GPU."""

from __future__ import annotations

import logging
import threading
from typing import Final, TypeAlias

import numpy

from asynckv.protocol.digests import Digester
from asynckv.tensors.cuda import DeviceMemory
from asynckv.tensors.runs import Memory, pieces_of
from asynckv.transports.parts import DoneCallback

__all__ = ("AnyMemory", "DevicePart")

logger = logging.getLogger(__name__)

AnyMemory: TypeAlias = Memory | DeviceMemory

_NOTHING: Final[AnyMemory] = memoryview(b"")
_PIECE_NBYTES: Final = 2**20
"""Digested while it is in the cache."""


class DevicePart:
    """One tensor on its way: its memory, how much of it has moved, whom to tell.

    ``begun_bytes`` are offered or granted, ``moved_bytes`` done. Bytes of the host are
    copied by the worker, to and from pinned memory, and never after :meth:`stop` has
    returned and :attr:`is_touched` is false. Those of a GPU have no digest.
    """

    def __init__(
        self,
        transfer: int,
        number: int,
        memory: AnyMemory,
        done: DoneCallback,
        known_digest: bytes | None,
    ) -> None:
        self.transfer = transfer
        self.number = number
        self.nbytes = memory.nbytes
        self.device = memory if isinstance(memory, DeviceMemory) else None
        self.begun_bytes = 0
        self.moved_bytes = 0
        self.operations = 0
        """How many are under way."""
        self.posted = 0
        """How many of them the worker has."""
        self.is_skipped = False
        self._memory = memory
        self._done = done
        self._known_digest = known_digest
        self._digester = Digester() if known_digest is None else None
        self._lock = threading.Lock()
        self._is_over = False
        self._touches = 0

    @property
    def is_over(self) -> bool:
        """Whether somebody was told, or nobody wants to be."""
        return self._is_over

    @property
    def is_touched(self) -> bool:
        """Whether anybody may read or write its memory."""
        return self._touches > 0 or (self.device is not None and self.posted > 0)

    @property
    def left_bytes(self) -> int:
        """Bytes that nobody has begun to move."""
        return self.nbytes - self.begun_bytes

    @property
    def needs_rest(self) -> bool:
        """Whether there are bytes of the host left that are digested."""
        return (
            self._digester is not None and self.device is None and self.left_bytes > 0
        )

    def copy_out(self, offset: int, target: memoryview) -> None:
        """Copy bytes of the host from ``offset`` into ``target``, and digest them."""
        self._copy(offset, target, is_out=True)

    def copy_in(self, offset: int, source: memoryview) -> None:
        """Copy ``source`` into bytes of the host at ``offset``, and digest it."""
        self._copy(offset, source, is_out=False)

    def digest_rest(self) -> None:
        """Digest what nobody wants: the sender tells its digest all the same."""
        for start in range(self.begun_bytes, self.nbytes, _PIECE_NBYTES):
            stop = min(start + _PIECE_NBYTES, self.nbytes)
            pieces = self._enter(start, stop)
            try:
                if self._digester is not None:
                    self._digester.update_all(pieces)
            finally:
                self._leave(pieces)

    def stop(self) -> None:
        """Tell nobody, and touch the memory no more."""
        with self._lock:
            self._is_over = True
            if not self._touches:
                self._let_go()

    def tell(self, error: BaseException | None = None) -> None:
        """Call ``done``, unless it was stopped. On the loop, once."""
        if self._is_over:
            return
        digest = self._known_digest or b""
        if self._digester is not None and self.device is None:
            digest = self._digester.digest()
        self.stop()
        try:
            self._done(b"" if error else digest, error)
        except Exception:  # of whoever waits for this part: the others still hear
            logger.exception("a payload's completion callback failed")

    def let_go_if_over(self) -> None:
        """Keep memory that nobody touches any more alive no longer."""
        with self._lock:
            if self._is_over and not self._touches:
                self._let_go()

    def _let_go(self) -> None:
        if not (self.device is not None and self.operations):
            self._memory = _NOTHING

    def _copy(self, offset: int, pinned: memoryview, *, is_out: bool) -> None:
        for start in range(0, pinned.nbytes, _PIECE_NBYTES):
            stop = min(start + _PIECE_NBYTES, pinned.nbytes)
            pieces = self._enter(offset + start, offset + stop)
            try:
                for piece in pieces:
                    beside = pinned[start : start + piece.nbytes]
                    start += piece.nbytes
                    target, source = (beside, piece) if is_out else (piece, beside)
                    numpy.copyto(
                        numpy.frombuffer(target, numpy.uint8),
                        numpy.frombuffer(source, numpy.uint8),
                    )
                if self._digester is not None:
                    self._digester.update_all(pieces)
            finally:
                self._leave(pieces)

    def _enter(self, start: int, stop: int) -> list[memoryview]:
        """Begin to touch these bytes; none if it was stopped."""
        with self._lock:
            if self._is_over or isinstance(self._memory, DeviceMemory):
                return []
            self._touches += 1
            return pieces_of(self._memory, start, stop)

    def _leave(self, pieces: list[memoryview]) -> None:
        if not pieces:
            return
        pieces.clear()
        with self._lock:
            self._touches -= 1
            if self._is_over and not self._touches:
                self._let_go()
