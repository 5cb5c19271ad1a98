"""One tensor of a pipe on its way, and the room and the credit that it needs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from asynckv.observability.waits import LoggedWait
from asynckv.transfers.outgoing import Outgoing
from asynckv.transfers.source import Source
from asynckv.types import TensorSpec
from asynckv.waits.queue import FairQueue

__all__ = ("INLINE_NBYTES", "MAX_TENSORS", "Credit", "Parcel", "SendRoom")

INLINE_NBYTES: Final = 64 * 1024
"""A tensor of so many bytes rides with its frame."""

MAX_TENSORS: Final = 4096
"""So many tensors are in flight, or wait to be received, however small."""


class Parcel:
    """One tensor, or None, on its way to the peer.

    ``source`` is the pipe's own copy, while it is still needed, or the caller's memory
    if it ``is_borrowed``. With ``is_sent`` its last byte has left, or can be read
    where it lies.
    """

    __slots__ = (
        "has_room",
        "is_borrowed",
        "is_copied",
        "is_sent",
        "nbytes",
        "outgoing",
        "source",
        "spec",
        "turn",
        "watchers",
    )

    def __init__(self, spec: TensorSpec | None, nbytes: int | None = None) -> None:
        self.spec = spec
        if nbytes is None:
            nbytes = 0 if spec is None else spec.nbytes
        self.nbytes = nbytes
        self.source: Source | None = None
        self.outgoing: Outgoing | None = None
        self.is_sent = self.is_borrowed = self.is_copied = self.has_room = False
        self.turn: asyncio.Future[None] | None = None
        self.watchers: list[asyncio.Future[bool]] = []

    def wake(self) -> None:
        """Whoever waits for its room looks again."""
        if self.turn is not None and not self.turn.done():
            self.turn.set_result(None)

    def release(self) -> None:
        """It is sent no more, and no copy is needed."""
        if self.outgoing is not None:
            self.outgoing.stop()
        if self.source is not None:
            self.source.release()
            self.source = None

    def settle(self, *, is_verified: bool) -> None:
        """Whoever waits for its arrival learns whether the peer has it."""
        for watcher in self.watchers:
            if not watcher.done():
                watcher.set_result(is_verified)


_ENDS_WITH: Final = "the peer's memory having what was sent before, or its end"


class SendRoom(FairQueue[Parcel]):
    """Bytes in flight, bounded, and a line of parcels that wait for room.

    Room is given in the order of the calls; a parcel above the bound goes alone.
    ``admitted(parcel)`` is called for each that has got room while it was in line.
    """

    def __init__(self, max_bytes: int, admitted: Callable[[Parcel], None]) -> None:
        super().__init__(self._admit)
        self.max_bytes = max_bytes
        self.used_bytes = 0
        self.used_tensors = 0
        self.waits = 0
        self._admitted = admitted
        self._is_closed = False

    async def wait_for(self, parcel: Parcel) -> None:
        """Wait for room, behind those who asked before, or until it is closed.

        Whoever fails or is cancelled here, or finds no room, calls :meth:`quit`.
        """
        if not self.join(parcel):
            self.waits += 1
            parcel.turn = asyncio.get_running_loop().create_future()
            who = f"send_tensor of {parcel.nbytes} bytes"
            room = f"room in a pipe of {self.max_bytes} bytes in flight"
            with LoggedWait(who, room, _ENDS_WITH):
                await parcel.turn

    def take_at_once(self, parcel: Parcel) -> bool:
        """Give it room if nobody waits and there is some; else ``False``."""
        if len(self) or self._is_closed or not self._fits(parcel):
            return False
        self._take(parcel)
        return True

    def release(self, parcel: Parcel) -> None:
        """Give back the room that a parcel had; nobody is admitted yet."""
        self.used_bytes -= parcel.nbytes
        self.used_tensors -= 1

    def close(self) -> None:
        """Give room to nobody any more; all who wait wake without it."""
        self._is_closed = True
        self.advance()

    def _admit(self, parcel: Parcel) -> bool:
        if not self._is_closed:
            if not self._fits(parcel):
                return False
            self._take(parcel)
            self._admitted(parcel)
        parcel.wake()
        return True

    def _take(self, parcel: Parcel) -> None:
        parcel.has_room = True
        self.used_bytes += parcel.nbytes
        self.used_tensors += 1

    def _fits(self, parcel: Parcel) -> bool:
        if self.used_tensors >= MAX_TENSORS:
            return False
        nbytes = self.used_bytes + parcel.nbytes
        return nbytes <= self.max_bytes or not self.used_bytes


class Credit:
    """What the peer says that it has room for.

    Its first word is its whole bound: a parcel above that goes when all is free.
    """

    def __init__(self) -> None:
        self._window_bytes: int | None = None
        self._free_bytes = 0
        self._free_tensors = 0

    def add(self, nbytes: int, tensors: int) -> None:
        """The peer has room for more."""
        if self._window_bytes is None:
            self._window_bytes = nbytes
        self._free_bytes += nbytes
        self._free_tensors += tensors

    def allows(self, nbytes: int) -> bool:
        """Whether a tensor of so many bytes may go now."""
        if self._free_tensors < 1:
            return False
        return nbytes <= self._free_bytes or self._free_bytes == self._window_bytes

    def take(self, nbytes: int) -> None:
        """A tensor of so many bytes goes."""
        self._free_tensors -= 1
        self._free_bytes -= nbytes
