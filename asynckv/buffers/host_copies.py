"""Copies in host memory of what a peer gets of a GPU by sockets, and their bound.

What is copied stays until a lane has sent it, which a slow peer delays for as long as
it likes. So the bytes are counted from the copy's turn until its memory is gone,
wherever that is: a lane may be at it when nobody wants it any more.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
from typing import Final, TypeAlias

import numpy
import numpy.typing

__all__ = ("HOST_COPIES_NBYTES", "HostCopies")

HOST_COPIES_NBYTES: Final = 64 * 2**20
"""Of one link; a longer tensor is alone."""

_Bytes: TypeAlias = numpy.typing.NDArray[numpy.uint8]


class HostCopies:
    """Memory of the host for one link's copies, first come, first served."""

    def __init__(self, max_bytes: int = HOST_COPIES_NBYTES) -> None:
        self.max_bytes = max_bytes
        self.used_bytes = 0
        """What there is now; more than the bound only if it is one tensor's."""
        self._loop = asyncio.get_running_loop()
        self._line: collections.deque[tuple[int, asyncio.Future[None]]] = (
            collections.deque()
        )

    async def empty(self, nbytes: int) -> memoryview:
        """Return new memory, which counts as long as anything refers to it.

        Waits behind those who asked before, until others' is gone. A cancelled call
        leaves no trace.
        """
        if self._line or not self._fits(nbytes):
            await self._turn(nbytes)
        else:
            self.used_bytes += nbytes
        try:
            memory = numpy.empty(nbytes, numpy.uint8)
        except BaseException:
            self._gone(nbytes)
            raise
        return numpy.asarray(_Counted(self, memory)).data

    def gone_soon(self, nbytes: int) -> None:
        """Some memory is gone. Called by finalizers: in any thread, at any moment."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._gone, nbytes)

    async def _turn(self, nbytes: int) -> None:
        turn: asyncio.Future[None] = self._loop.create_future()
        self._line.append((nbytes, turn))
        try:
            await turn
        except BaseException:
            if turn.done() and not turn.cancelled():
                self._gone(nbytes)  # it was given in the same tick
            else:
                self._line.remove((nbytes, turn))
                self._advance()
            raise

    def _gone(self, nbytes: int) -> None:
        self.used_bytes -= nbytes
        self._advance()

    def _advance(self) -> None:
        while self._line:
            nbytes, turn = self._line[0]
            # One that is cancelled leaves the line by itself, and calls again.
            if turn.cancelled() or not self._fits(nbytes):
                break
            self._line.popleft()
            self.used_bytes += nbytes
            turn.set_result(None)

    def _fits(self, nbytes: int) -> bool:
        return not self.used_bytes or self.used_bytes + nbytes <= self.max_bytes


class _Counted:
    """What all views of one copy are based on: its life is what counts."""

    __slots__ = ("__array_interface__", "_copies", "_memory")

    def __init__(self, copies: HostCopies, memory: _Bytes) -> None:
        self._copies = copies
        self._memory = memory
        self.__array_interface__ = memory.__array_interface__

    def __del__(self) -> None:
        self._copies.gone_soon(self._memory.nbytes)
