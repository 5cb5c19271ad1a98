"""The sending half of a pipe: order, room, and what the peer is known to have.

A tensor has its place in the stream from the moment it has room; from there on only
plain functions move it. Its bytes count as in flight until the peer has said that its
memory holds them. A small one leaves with its frame; of a larger one the peer is told,
perhaps where it can read it, and a transfer of its own sends it as it is granted.
"""

from __future__ import annotations

import asyncio
import collections
import itertools
from collections.abc import Callable
from functools import partial
from typing import Final

import torch

from asynckv.devices.growth import Growth
from asynckv.errors import EndOfStream, PeerLost, PipeBroken, RemoteProtocolError
from asynckv.links.link import LinkStream
from asynckv.links.options import Digest
from asynckv.observability.waits import LoggedWait
from asynckv.pipes.gpu_side import GpuSide
from asynckv.pipes.shared_memory import MapSharing
from asynckv.protocol.codec import Buffer
from asynckv.protocol.frames import Push
from asynckv.protocol.transfer_frames import Grant, Sent
from asynckv.tensors.paged_arena import SlabRegion
from asynckv.tensors.runs import joined
from asynckv.transfers.outgoing import Outgoing, ignore_grant
from asynckv.transfers.source import Source, release_staged
from asynckv.types import TensorSpec
from asynckv.waits.waiting import FairQueue, wait_shielded

__all__ = (
    "INLINE_NBYTES",
    "MAX_TENSORS",
    "Credit",
    "Outbound",
    "Parcel",
    "SendRoom",
)


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
            release_staged([self.source])
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


_MAX_OUTGOING_BYTES: Final = 2**20


class Outbound:
    """What one side sends through a pipe, in order, by ``stream``.

    ``send_small`` queues a frame with the spec, the digest and the bytes of a small
    tensor, and never waits. ``failed`` is told, on the loop, what breaks the pipe.
    """

    def __init__(
        self,
        stream: LinkStream,
        send_small: Callable[[TensorSpec | None, bytes, Buffer], None],
        max_bytes: int,
        failed: Callable[[Exception], None] = lambda error: None,
    ) -> None:
        self.sent_bytes = 0
        self.sent_tensors = 0
        self.maybe_delivered = 0
        self.gpus: GpuSide | None = None
        self.mapping: MapSharing | None = None
        self._stream = stream
        self._link = stream.link
        self._send_small = send_small
        self._failed = failed
        self._queue: collections.deque[Parcel] = collections.deque()
        self._pushed: collections.deque[Parcel] = collections.deque()
        self._offered: dict[int, Parcel] = {}
        """Those of them that did not leave with their frame."""
        self._verified_count = 0
        self.room = SendRoom(max_bytes, self._queue.append)
        self._memory = Growth(max_bytes)
        self._credit = Credit()
        self._awaits_drain = False
        self._is_refusing = False
        self._lost: PeerLost | None = None
        self._unquiet: list[tuple[Outgoing, bool]] = []
        """What may be read still though nothing leaves any more, and is it lent?"""

    async def reserve(self, parcel: Parcel) -> None:
        """Wait for room, behind those who asked before, and take a place.

        Whoever fails or is cancelled here or later calls :meth:`drop`.

        :raises PipeBroken: the peer is lost
        :raises EndOfStream: one of the sides has closed the pipe
        """
        self.check()
        await self.room.wait_for(parcel)
        self.check()

    def share_memory(self, digest: Digest) -> MapSharing:
        """Let the peer read what is sent in memory of this side's, once it may."""
        self.mapping = MapSharing(self._link, self._memory, digest)
        return self.mapping

    def digests(self, nbytes: int) -> bool:
        """Is a tensor of so many bytes to be digested while it is copied?"""
        mapping = self.mapping if nbytes > INLINE_NBYTES else None
        is_later = mapping is not None and mapping.compares_edges
        return self._link.digest != "off" and not is_later

    def empty(self, spec: TensorSpec) -> torch.Tensor:
        """Return a tensor for the application to fill: see :meth:`region_of`."""
        return self._memory.spares.empty(spec)

    def region_of(self, tensor: torch.Tensor) -> SlabRegion | None:
        """Return what ``tensor`` is all of, if it is from :meth:`empty`."""
        regions = self._memory.spares.regions_of([tensor])
        return regions[0] if regions else None

    async def memory_for(
        self, spec: TensorSpec
    ) -> tuple[torch.Tensor, SlabRegion | None]:
        """Return memory for the copy of a tensor that has its place, and its region.

        It comes back when it has left. A cancelled call leaves no trace.
        """
        await self._memory.reach(spec.nbytes)
        return self._memory.spares.spare_region(spec)

    def send_small(self, spec: TensorSpec | None, body: bytes, digest: bytes) -> bool:
        """Let a small tensor go at once, unless it has to wait for anything.

        It has to where others are before it, or there is no room, here or at the
        peer. Never waits. ``body`` are its bytes.
        """
        if self._queue or self._link.outgoing_bytes >= _MAX_OUTGOING_BYTES:
            return False
        nbytes = len(body)
        parcel = Parcel(spec, nbytes)
        if not (self._credit.allows(nbytes) and self.room.take_at_once(parcel)):
            return False
        parcel.is_copied = parcel.is_sent = True
        self.sent_tensors += 1
        self.sent_bytes += nbytes
        self._credit.take(nbytes)
        self._pushed.append(parcel)
        self._send_small(spec, digest, body)
        return True

    @property
    def is_reading_borrowed(self) -> bool:
        """Is there memory of the caller's that has not left?"""
        parcels = itertools.chain(self._queue, self._pushed)
        return any(one.is_borrowed and one.source is not None for one in parcels)

    def put(self, parcel: Parcel, source: Source | None) -> None:
        """Let a parcel go that has its place, now that it is copied. Never waits.

        :raises PipeBroken: the peer is lost
        :raises EndOfStream: one of the sides has closed the pipe
        """
        parcel.source = source  # from here on it is the parcel that lets it go
        self.check()
        parcel.is_copied = True
        self.sent_tensors += 1
        self.sent_bytes += parcel.nbytes
        self._advance()

    def drop(self, parcel: Parcel) -> None:
        """Give up what was not put: its room, and its place. Never waits."""
        parcel.release()
        if parcel.has_room:
            self._queue.remove(parcel)
            self.room.release(parcel)
        else:
            self.room.quit(parcel)
        self.room.advance()
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

    def has_room(self, nbytes: int, tensors: int) -> None:
        """The peer has room for so much more."""
        self._credit.add(nbytes, tensors)
        self._advance()

    def on_grant(self, frame: Grant) -> None:
        """The peer's memory is ready for a tensor.

        :raises RemoteProtocolError: it was never offered, or nothing leads there
        """
        parcel = self._offered.get(frame.transfer)
        if parcel is None or parcel.outgoing is None:
            ignore_grant(frame, self._link)
            return
        # Whatever else reads it keeps it, and may say for itself that it has it.
        parcel.is_sent = parcel.source is None or frame.route != "link"
        parcel.outgoing.on_grant(frame)

    def has_verified(self, tensors: int) -> None:
        """The peer's memory holds everything up to there.

        :raises RemoteProtocolError: that was never sent, or is still on its way
        """
        count = tensors - self._verified_count
        if not 0 <= count <= len(self._pushed):
            raise RemoteProtocolError("a Flushed for what was never sent")
        for _ in range(count):
            parcel = self._pushed.popleft()
            if not parcel.is_sent:
                raise RemoteProtocolError("a Flushed for what is still on its way")
            self._verified_count += 1
            if parcel.outgoing is not None:
                del self._offered[parcel.outgoing.transfer]
                parcel.outgoing.release()
                parcel.release()
            self.room.release(parcel)
            if parcel.watchers:
                parcel.settle(is_verified=True)
        if self.room:
            self.room.advance()

    def end(self, error: PeerLost) -> None:
        """Nothing leaves any more. Never waits; only the first call counts."""
        if self._lost is not None:
            return
        self._lost = error
        given_up = [*self._pushed, *(p for p in self._queue if p.is_copied)]
        self.maybe_delivered = len(given_up)
        self._pushed.clear()
        self._offered.clear()
        left = [parcel for parcel in self._queue if not parcel.is_copied]
        self._queue.clear()
        self._queue.extend(left)
        for parcel in given_up:
            # What reads the memory keeps it, be that a thread or the peer.
            parcel.release()
            if parcel.outgoing is not None and parcel.outgoing.is_busy:
                self._unquiet.append((parcel.outgoing, parcel.is_borrowed))
            self.room.release(parcel)
            parcel.settle(is_verified=False)
        self.room.close()

    async def aclose(self) -> None:
        """Give idle memory back. Bounded; what leaves still keeps its own."""
        await self.quiesce()
        await self._memory.aclose()

    async def quiesce(self) -> None:
        """After the end: wait until nothing reads what was to leave.

        At most 1 s, for all of that together.
        """
        if self._unquiet:
            waits = [outgoing.quiesce() for outgoing, _ in self._unquiet]
            await wait_shielded(asyncio.gather(*waits, return_exceptions=True))
            self._unquiet.clear()

    def abort(self) -> None:
        """As :meth:`aclose`, after the link's end. Never waits, but as long as a thread
        takes to let go of what was lent.
        """
        for outgoing, is_borrowed in self._unquiet:
            if is_borrowed:
                self._link.payload.block_until_quiet(outgoing.transfer)
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
        if parcel.nbytes <= INLINE_NBYTES:
            self._push_small(parcel)
            return
        self._offer(parcel)

    def _push_small(self, parcel: Parcel) -> None:
        source, parcel.is_sent = parcel.source, True
        if source is None:
            self._send_small(None, b"", b"")
        else:
            self._send_small(parcel.spec, source.digest, joined(source.host()))
        parcel.release()

    def _offer(self, parcel: Parcel) -> None:
        """Tell the peer of a large one: it reads that where it lies, or grants it."""
        source, transfer = parcel.source, self._link.new_transfer()
        if source is None:
            raise TypeError("a parcel that is nowhere")
        parcel.outgoing = outgoing = Outgoing(
            *(self._stream, transfer, self.gpus),
            failed=self._failed,
            is_on_gpu=source.is_on_gpu,
            sent=partial(self._sent, parcel),
        )
        outgoing.add(0, source)
        self._offered[transfer] = parcel
        # What is received on a GPU is sent from there, and no memory is mapped.
        sharing = self.mapping if self.gpus is None else self.gpus.sharing
        shown = None if sharing is None else sharing.show(source, outgoing)
        parcel.is_sent = shown is not None
        place, digest = shown or (None, b"")
        on_gpu = source.is_on_gpu and not shown
        push = Push(transfer, 0, False, parcel.spec, digest, on_gpu, place)
        self._stream.send(push)

    def _sent(self, parcel: Parcel, frame: Sent) -> None:
        parcel.is_sent = True
        self._stream.send(frame)
        if frame.route == "link":  # which is never lost: it is not asked for again
            parcel.release()

    def _last_copied(self) -> Parcel | None:
        for parcel in reversed(self._queue):
            if parcel.is_copied:
                return parcel
        return self._pushed[-1] if self._pushed else None
