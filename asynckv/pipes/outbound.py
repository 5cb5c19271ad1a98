"""The sending half of a pipe: order, and what the peer is known to have.

A tensor has its place in the stream from the moment it has room; from there on
only plain functions move it. Its bytes count as in flight until the peer has
said that its memory holds them.
"""

from __future__ import annotations

import asyncio
import collections
from collections.abc import Callable
from typing import Final

import torch

from asynckv.errors import EndOfStream, PeerLost, PipeBroken, RemoteProtocolError
from asynckv.links.link import Link
from asynckv.observability.waits import LoggedWait
from asynckv.pipes.leaving import Leaving
from asynckv.pipes.parcels import INLINE_NBYTES, Parcel
from asynckv.pipes.room import Credit, SendRoom
from asynckv.protocol.frames import (
    Flushed,
    Frame,
    Push,
    Read,
)
from asynckv.tensors.growth import Growth
from asynckv.tensors.views import bytes_of
from asynckv.types import TensorSpec

__all__ = ("Outbound",)

_MAX_OUTGOING_BYTES: Final = 2**20


class Outbound:
    """What one side sends through a pipe, in order.

    ``send`` queues a frame on the pipe's stream and never waits. ``failed`` is told
    what breaks the pipe.
    """

    def __init__(
        self,
        link: Link,
        send: Callable[[Frame, memoryview], None],
        max_bytes: int,
        failed: Callable[[Exception], None] = lambda error: None,
    ) -> None:
        self.sent_bytes = 0
        self.sent_tensors = 0
        self.maybe_delivered = 0
        self._link = link
        self._send = send
        self._queue: collections.deque[Parcel] = collections.deque()
        self._pushed: collections.deque[Parcel] = collections.deque()
        self._verified_count = 0
        self.room = SendRoom(max_bytes, self._queue.append)
        self._memory = Growth(max_bytes)
        self.leaving = Leaving(link, send, self._memory, failed)
        self._credit = Credit()
        self._awaits_drain = False
        self._is_refusing = False
        self._lost: PeerLost | None = None

    async def reserve(self, parcel: Parcel) -> None:
        """Wait for room, behind those who asked before, and take a place.

        Whoever fails or is cancelled here or later calls :meth:`drop`.

        :raises PipeBroken: the peer is lost
        :raises EndOfStream: one of the sides has closed the pipe
        """
        self.check()
        await self.room.wait_for(parcel)
        self.check()

    async def memory_for(self, spec: TensorSpec) -> torch.Tensor:
        """Return memory for the copy of a tensor that has its place.

        It comes back when it has left. A cancelled call leaves no trace.
        """
        await self._memory.reach(spec.nbytes)
        return self._memory.lending.spare(spec)

    def put(self, parcel: Parcel, memory: torch.Tensor | None, digest: bytes) -> None:
        """Let a parcel go that has its place, now that it is copied. Never waits.

        :raises PipeBroken: the peer is lost
        :raises EndOfStream: one of the sides has closed the pipe
        """
        self.check()
        parcel.memory, parcel.digest, parcel.is_copied = memory, digest, True
        self.sent_tensors += 1
        self.sent_bytes += parcel.nbytes
        self._advance()

    def drop(self, parcel: Parcel) -> None:
        """Give up what was not put: its room, and its place. Never waits."""
        parcel.let_go()
        if parcel.has_room:
            self._queue.remove(parcel)
            self.room.release(parcel)
        else:
            self.room.leave(parcel)
        self.room.admit()
        self._advance()

    async def flush(self) -> None:
        """Wait until the peer's memory holds everything that was put.

        A cancelled call leaves no trace.

        :raises PipeBroken: not everything arrived, and never will
        """
        last = self._last_copied()
        if last is not None:
            watcher: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
            last.watchers.append(watcher)
            what = f"{self.room.used_bytes} bytes to be in the peer's memory"
            with LoggedWait("flush", what, "the peer's recv_tensor, or its end"):
                if await watcher:
                    return
        if self._lost is not None and (self.maybe_delivered or not self._lost.goodbye):
            raise self._failure()

    def refuse(self) -> None:
        """Take no more; what was put still leaves. Never waits."""
        self._is_refusing = True
        self.room.close()

    def check(self) -> None:
        """Raise what a sender has to know.

        :raises PipeBroken: the peer is lost
        :raises EndOfStream: one of the sides has closed the pipe
        """
        if self._lost is not None:
            raise self._failure()
        if self._is_refusing:
            raise EndOfStream("the pipe was closed on this side")

    def on_read(self, frame: Read) -> None:
        """The peer has room for more."""
        self._credit.add(frame.nbytes, frame.tensors)
        self._advance()

    def on_flushed(self, frame: Flushed) -> None:
        """The peer's memory holds everything up to there."""
        count = frame.tensors - self._verified_count
        if not 0 <= count <= len(self._pushed):
            raise RemoteProtocolError("a Flushed for what was never sent")
        for _ in range(count):
            parcel = self._pushed.popleft()
            if not parcel.is_sent:
                raise RemoteProtocolError("a Flushed for what is still on its way")
            self._verified_count += 1
            self.leaving.forget(parcel)
            parcel.let_go()
            self.room.release(parcel)
            parcel.settle(is_verified=True)
        self.room.admit()

    def end(self, error: PeerLost) -> None:
        """Nothing leaves any more. Never waits; only the first call counts."""
        if self._lost is not None:
            return
        self._lost = error
        given_up = [*self._pushed, *(p for p in self._queue if p.is_copied)]
        self.maybe_delivered = len(given_up)
        self._pushed.clear()
        self.leaving.end()
        left = [parcel for parcel in self._queue if not parcel.is_copied]
        self._queue.clear()
        self._queue.extend(left)
        for parcel in given_up:
            # The transport keeps the memory for as long as a thread reads it.
            parcel.let_go()
            self.room.release(parcel)
            parcel.settle(is_verified=False)
        self.room.close()

    async def aclose(self) -> None:
        """Give idle memory back. Bounded; what leaves still keeps its own."""
        await self.leaving.aclose()
        await self._memory.aclose()

    def abort(self) -> None:
        """As :meth:`aclose`, but never waits."""
        self._memory.close()

    def _failure(self) -> PipeBroken | EndOfStream:
        lost = self._lost
        if lost is None or (lost.goodbye and not self.maybe_delivered):
            return EndOfStream(lost.message if lost else "the pipe is closed")
        broken = PipeBroken(
            lost.message, maybe_delivered=self.maybe_delivered, hint=lost.hint
        )
        broken.__cause__ = lost.__cause__
        return broken

    def _advance(self) -> None:
        while self._queue and self._queue[0].is_copied and self._may_push():
            self._push(self._queue.popleft())

    def _may_push(self) -> bool:
        if not self._credit.allows(self._queue[0].nbytes):
            return False
        if self._link.outgoing_bytes < _MAX_OUTGOING_BYTES:
            return True
        if not self._awaits_drain:
            self._awaits_drain = True
            self._link.call_when_drained(self._on_drained)
        return False

    def _on_drained(self) -> None:
        self._awaits_drain = False
        self._advance()

    def _push(self, parcel: Parcel) -> None:
        self._credit.take(parcel.nbytes)
        self._pushed.append(parcel)
        parcel.transfer = self._link.new_transfer()
        inline = parcel.nbytes <= INLINE_NBYTES
        shown = None if inline else self.leaving.show(parcel)
        if shown is not None:
            self.leaving.add(parcel)
            self._send(shown, memoryview(b""))
            return
        digest = parcel.digest if inline else b""
        on_gpu = parcel.memory is None and parcel.region is not None
        push = Push(parcel.transfer, 0, inline, parcel.spec, digest, on_gpu)
        parcel.is_sent = inline
        if not inline:
            self.leaving.add(parcel)
        body = memoryview(b"")
        if inline and parcel.memory is not None:
            body, parcel.memory = bytes_of(parcel.memory), None
        self._send(push, body)

    def _last_copied(self) -> Parcel | None:
        for parcel in reversed(self._queue):
            if parcel.is_copied:
                return parcel
        return self._pushed[-1] if self._pushed else None
