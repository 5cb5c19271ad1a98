"""A consumer's receive bound: what peers may send that nobody has taken yet."""

from __future__ import annotations

import asyncio
import collections

import torch

from asynckv.errors import EntryTooLarge
from asynckv.observability.waits import LoggedWait
from asynckv.tensors.growth import Growth
from asynckv.types import TensorSpec

__all__ = ("ReceiveBudget",)

_ENDS_WITH = "the end of another drop_select or get"


class ReceiveBudget:
    """Bytes, first come, first served, and the ``memory`` of as many for them."""

    def __init__(self, max_bytes: int, memory: Growth | None = None) -> None:
        self.max_bytes = max_bytes
        self._memory = memory or Growth(max_bytes)
        self.used_bytes = 0
        self._line: collections.deque[tuple[int, asyncio.Future[None]]] = (
            collections.deque()
        )

    def empty(self, spec: TensorSpec) -> torch.Tensor:
        """Return a tensor for some of the bytes that were reserved."""
        return self._memory.lending.spare(spec)

    async def reserve(self, nbytes: int, *, in_host: bool = True) -> None:
        """Take ``nbytes``, waiting behind those who asked before.

        Also waits for slabs that are under way, if they are needed for so much
        ``in_host`` memory.

        A cancelled call leaves no trace.

        :raises EntryTooLarge: ``nbytes`` exceeds the bound
        """
        if nbytes > self.max_bytes:
            raise EntryTooLarge(
                nbytes=nbytes,
                max_bytes=self.max_bytes,
                hint="raise connect(max_bytes=...) or pass into=",
            )
        await self._wait_for(nbytes)
        if not in_host:
            return
        try:
            await self._memory.reach(nbytes)
        except BaseException:
            self.release(nbytes)
            raise

    def release(self, nbytes: int) -> None:
        """Give bytes back. Never waits."""
        self.used_bytes -= nbytes
        self._advance()

    async def _wait_for(self, nbytes: int) -> None:
        if not self._line and self.used_bytes + nbytes <= self.max_bytes:
            self.used_bytes += nbytes
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._line.append((nbytes, turn))
        try:
            who, what = f"a delivery of {nbytes} bytes", "room in the receive bound of"
            with LoggedWait(who, f"{what} {self.max_bytes} bytes", _ENDS_WITH):
                await turn
        except BaseException:
            if turn.done() and not turn.cancelled():
                self.release(nbytes)  # it was given in the same tick
            else:
                self._line.remove((nbytes, turn))
                self._advance()
            raise

    def _advance(self) -> None:
        while self._line:
            nbytes, turn = self._line[0]
            # One that is cancelled leaves the line by itself, and calls again.
            if turn.cancelled() or self.used_bytes + nbytes > self.max_bytes:
                break
            self._line.popleft()
            self.used_bytes += nbytes
            turn.set_result(None)
