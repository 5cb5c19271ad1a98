"""Copies of tensors on their way from this side's GPU to a peer's.

They lie on that GPU: NCCL moves these alone, so that nobody has to abort it for the
caller's memory to be left alone, and by CUDA IPC a peer on the same GPU reads these
alone. Room is handed out first come, first served, all that belongs together at once;
it is the asker's until it is released, and then until nothing is at it any more. What
finds no room goes through host memory, and is read on the GPU when it leaves, not
before: so one piece is brought to the host while the last one is on the wire.
"""

from __future__ import annotations

import abc
import asyncio
import logging
from collections.abc import Sequence

from asynckv.abc import InsertWriter
from asynckv.devices.growth import Growth
from asynckv.errors import PeerLost
from asynckv.observability.waits import LoggedWait
from asynckv.transfers.source import StagedTensor, release_staged
from asynckv.types import TensorSpec
from asynckv.waits.queue import FairQueue
from asynckv.waits.replies import Reply

__all__ = ("GpuRoom", "StagingWriter")


logger = logging.getLogger(__name__)


class StagingWriter(InsertWriter):
    """A writer from memory of this side's GPU, where something leads on from there."""

    @abc.abstractmethod
    async def room(self, specs: Sequence[TensorSpec]) -> list[StagedTensor] | None:
        """Take memory for tensors that are made there, and put by :meth:`put_staged`.

        ``None``: nothing leads from there to the buffer's GPU now, they are too small
        for that, or they would never fit. Waits, first come, first served, until
        others have left. Who gets memory releases it. A cancelled call has taken none.

        :raises EntryAborted: the entry is gone already
        :raises PeerLost: the peer is gone
        """

    @abc.abstractmethod
    async def put_staged(self, name: str, staged: StagedTensor) -> None:
        """As :meth:`put`, of what was made in its memory and is ready.

        On return, however it ends, it may be released: the peer, or the GPU, keeps
        what it is still at.
        """


class GpuRoom:
    """Hands out memory of ``growth``, which is open, in the order of those who ask."""

    def __init__(self, growth: Growth) -> None:
        self._growth = growth
        self._line: FairQueue[_Waiting] = FairQueue(self._give)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_looking = False
        self._was_too_small = False
        growth.call_when_given_back(self._recheck_soon)

    def is_awaited(self) -> bool:
        """Whether somebody waits: then nobody else is to take of that memory."""
        return bool(self._line)

    async def take(
        self, specs: Sequence[TensorSpec], lost: set[Reply[list[StagedTensor]]]
    ) -> list[StagedTensor] | None:
        """Return memory for each, waiting for its turn; ``None``: it would never fit.

        Who is in ``lost`` meanwhile can be failed. A cancelled call leaves no trace.
        """
        pages, sizes = self._growth.device_pages, [spec.nbytes for spec in specs]
        if pages is None or not pages.could_ever_fit(sizes):
            there = 0 if pages is None else pages.nbytes
            self._warn_too_small(sum(sizes), there)
            return None
        waiting = _Waiting(tuple(specs))
        self._loop = asyncio.get_running_loop()
        lost.add(waiting.turn)
        try:
            if self._line.join(waiting):
                return await waiting.turn
            who = f"what leaves a GPU ({sum(sizes)} bytes)"
            with LoggedWait(who, "room to be sent from", "the end of what left before"):
                return await waiting.turn
        except BaseException:
            release_staged(waiting.taken)  # it was given in the same tick
            raise
        finally:
            lost.discard(waiting.turn)
            self._line.quit(waiting)

    def _taken(self, specs: Sequence[TensorSpec]) -> list[StagedTensor] | None:
        regions = self._growth.take_on_device([spec.nbytes for spec in specs])
        if regions is None:
            return None
        return [StagedTensor(r, s) for r, s in zip(regions, specs, strict=True)]

    def _recheck_soon(self) -> None:
        """Not at once: whoever gives memory back is in the middle of something."""
        loop = self._loop  # it may be that none runs here
        if self._line and not self._is_looking and loop and not loop.is_closed():
            self._is_looking = True
            loop.call_soon(self._recheck)

    def _recheck(self) -> None:
        self._is_looking = False
        self._line.advance()

    def _give(self, waiting: _Waiting) -> bool:
        if not waiting.turn.is_in:
            if self._growth.arena.is_closed:
                waiting.turn.fail(PeerLost("the way to the peer was closed"))
            elif (taken := self._taken(waiting.specs)) is not None:
                waiting.taken = taken
                waiting.turn.give(taken)
        return waiting.turn.is_in

    def _warn_too_small(self, nbytes: int, there: int) -> None:
        if not self._was_too_small:
            self._was_too_small = True
            logger.warning(
                "%d bytes leave through host memory: there are %d of the GPU to send "
                "from",
                *(nbytes, there),
            )


class _Waiting:
    """One place in the line."""

    def __init__(self, specs: Sequence[TensorSpec]) -> None:
        self.specs = specs
        self.turn: Reply[list[StagedTensor]] = Reply()
        self.taken: Sequence[StagedTensor] = ()
