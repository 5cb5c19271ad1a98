"""Who may send now: the line for room on this side, and what the peer has room for.

Plain changes of state; whoever waits looks again when it is woken.
"""

from __future__ import annotations

import asyncio
import collections
from collections.abc import Callable
from typing import Final

from asynckv.observability.waits import LoggedWait
from asynckv.pipes.parcels import MAX_TENSORS, Parcel

__all__ = ("Credit", "SendRoom")

_ENDS_WITH: Final = "the peer's memory having what was sent before, or its end"


class SendRoom:
    """Bytes in flight, bounded, and a line of parcels that wait for room.

    Room is given in the order of the calls; a parcel above the bound goes alone.
    ``admitted(parcel)`` is called for each that has got room.
    """

    def __init__(self, max_bytes: int, admitted: Callable[[Parcel], None]) -> None:
        self.max_bytes = max_bytes
        self.used_bytes = 0
        self.used_tensors = 0
        self.waits = 0
        self._admitted = admitted
        self._line: collections.deque[Parcel] = collections.deque()
        self._is_closed = False

    def __len__(self) -> int:
        return len(self._line)

    async def wait_for(self, parcel: Parcel) -> None:
        """Wait for room, behind those who asked before, or until it is closed.

        Whoever fails or is cancelled here, or finds no room, calls :meth:`leave`.
        """
        self._line.append(parcel)
        self.admit()
        if not (parcel.has_room or self._is_closed):
            self.waits += 1
            parcel.turn = asyncio.get_running_loop().create_future()
            who = f"send_tensor of {parcel.nbytes} bytes"
            room = f"room in a pipe of {self.max_bytes} bytes in flight"
            with LoggedWait(who, room, _ENDS_WITH):
                await parcel.turn

    def leave(self, parcel: Parcel) -> None:
        """Give up a place in the line, if it has one."""
        if parcel in self._line:
            self._line.remove(parcel)

    def release(self, parcel: Parcel) -> None:
        """Give back the room that a parcel had; nobody is admitted yet."""
        self.used_bytes -= parcel.nbytes
        self.used_tensors -= 1

    def admit(self) -> None:
        """Give room to the first in line, and to the next, while it lasts."""
        while self._line and not self._is_closed and self._fits(self._line[0]):
            parcel = self._line.popleft()
            parcel.has_room = True
            self.used_bytes += parcel.nbytes
            self.used_tensors += 1
            self._admitted(parcel)
            parcel.wake()

    def close(self) -> None:
        """Give room to nobody any more; all who wait wake without it."""
        self._is_closed = True
        line, self._line = self._line, collections.deque()
        for parcel in line:
            parcel.wake()

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
