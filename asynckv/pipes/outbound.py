"""The sending half of a pipe: order, room, and what the peer is known to have.

A tensor has its place in the stream from the moment it has room; from there on only
plain functions move it. Its bytes count as in flight until the peer has said that its
memory holds them. They leave by the link's payload, or from GPU to GPU. What left from
GPU to GPU, or is to be read where it lies, may be asked for by the link's payload,
until the peer has verified it. Tasks read back what a GPU has.
"""

from __future__ import annotations

import asyncio
import collections
import itertools
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final

import torch

from asynckv.errors import (
    EndOfStream,
    LocalProtocolError,
    PeerLost,
    PipeBroken,
    RemoteProtocolError,
)
from asynckv.links.link import Link
from asynckv.links.options import Digest
from asynckv.observability.waits import LoggedWait
from asynckv.pipes.gpu_sharing import GpuSharing
from asynckv.pipes.gpu_side import GpuSide
from asynckv.pipes.map_sharing import MapSharing
from asynckv.pipes.parcels import INLINE_NBYTES, Credit, Parcel, SendRoom
from asynckv.protocol.codec import Buffer
from asynckv.protocol.frames import Frame, Push
from asynckv.protocol.handshake import DigestMode, strictest
from asynckv.protocol.transfer_frames import (
    Grant,
    PushMapped,
    PushShared,
    Sent,
)
from asynckv.tensors.growth import Growth
from asynckv.tensors.views import bytes_of
from asynckv.types import TensorSpec
from asynckv.waits.own_tasks import OwnTasks

__all__ = (
    "Leaving",
    "Outbound",
)


_NOTHING: Final = memoryview(b"")


class Leaving:
    """The parcels of one pipe that were pushed without their bytes.

    ``failed`` is told, on the loop, why one cannot leave any more.
    """

    def __init__(
        self,
        link: Link,
        send: Callable[[Frame, Buffer], None],
        memory: Growth,
        failed: Callable[[Exception], None],
    ) -> None:
        self.gpus: GpuSide | None = None
        self.mapping: MapSharing | None = None
        self._link = link
        self._send = send
        self._memory = memory
        self._waiting: dict[int, Parcel] = {}
        self._shown: dict[int, tuple[GpuSharing, int]] = {}
        self._by_gpu: dict[int, Parcel] = {}
        self._reading: dict[int, asyncio.Task[None]] = {}
        self._lent: set[int] = set()
        """What leaves from the caller's memory."""
        self._tasks = OwnTasks(failed)

    def add(self, parcel: Parcel) -> None:
        """It leaves when the peer grants it memory."""
        self._waiting[parcel.transfer] = parcel

    def show(self, parcel: Parcel) -> PushShared | PushMapped | None:
        """Let the peer read it where it lies, if it can: return what it is told.

        It may grant it as well.
        """
        if self.mapping is not None and (mapped := self.mapping.show(parcel)):
            parcel.is_sent = True
            return mapped
        gpus, region = self.gpus, parcel.region
        if gpus is None or region is None or parcel.spec is None:
            return None
        if not gpus.sharing.is_open:
            return None
        number = gpus.sharing.pin(region)
        self._shown[parcel.transfer] = gpus.sharing, number
        parcel.is_sent = True
        return PushShared(parcel.transfer, parcel.spec, region.start, parcel.digest)

    def on_grant(self, frame: Grant) -> None:
        """The peer's memory is ready for a tensor, for the link's payload.

        :raises RemoteProtocolError: it waits for none
        """
        parcel = self._waiting.pop(frame.transfer, None) or self._stop(frame.transfer)
        if parcel is None:
            raise RemoteProtocolError("a Grant for what waits for none")
        parcel.is_sent = False
        if parcel.memory is None:
            self._start(parcel, partial(self._copy_to_host, parcel))
        else:
            self._send_by_link(parcel)

    def on_routed_grant(self, frame: Grant) -> None:
        """The peer's memory of its GPU is ready for a tensor.

        If this side's way is over, the peer will hear of that, and grant it again.

        :raises RemoteProtocolError: it waits for none, there is no way, or it is not
            on this side's GPU
        """
        gpus, transfer = self.gpus, frame.transfer
        way = None if gpus is None else gpus.opening.agreed_way
        parcel = self._waiting.pop(transfer, None)
        is_here = parcel is not None and parcel.memory is None
        if parcel is None or not is_here or gpus is None or way is None:
            raise RemoteProtocolError("a Grant for what waits for none")
        kind = strictest(gpus.digest, frame.digest)
        self._by_gpu[transfer] = parcel

        def sent(_: bytes, error: BaseException | None) -> None:
            if error is None and self._by_gpu.get(transfer) is parcel:
                self._start(parcel, partial(self._tell_sent, gpus, parcel, kind))

        try:
            way.transport.send(transfer, 0, parcel.place(), sent)
        except LocalProtocolError as exc:
            raise RemoteProtocolError("GPUs that are not connected") from exc

    def forget(self, parcel: Parcel) -> None:
        """The peer has verified it."""
        self._waiting.pop(parcel.transfer, None)
        self._by_gpu.pop(parcel.transfer, None)
        self._reading.pop(parcel.transfer, None)
        if self.mapping is not None:
            self.mapping.unpin(parcel.transfer)
        if (shown := self._shown.pop(parcel.transfer, None)) is not None:
            sharing, number = shown
            sharing.unpin(number)

    def end(self) -> None:
        """Nothing leaves any more. Never waits."""
        self._waiting.clear()
        self._shown.clear()  # the peer may still read it, until it says otherwise
        for transfer in list(self._by_gpu):
            self._stop(transfer)
        self._tasks.cancel()

    async def aclose(self) -> None:
        """Wait until no thread and no GPU reads what was to leave."""
        self.end()
        await self._tasks.wait()
        await self.quiesce()

    async def quiesce(self) -> None:
        """After the end: wait until nothing reads the caller's memory (at most 1 s)."""
        while self._lent:
            transfer = next(iter(self._lent))
            await self._link.payload.quiesce(transfer)
            self._lent.discard(transfer)

    def block_until_quiet(self) -> None:
        """As :meth:`quiesce`, but it blocks."""
        while self._lent:
            self._link.payload.block_until_quiet(self._lent.pop())

    def _stop(self, transfer: int) -> Parcel | None:
        """Stop what goes from GPU to GPU, if it does; return that."""
        parcel = self._by_gpu.pop(transfer, None)
        if parcel is not None and self.gpus is not None:
            if (way := self.gpus.opening.agreed_way) is not None:
                way.transport.stop(transfer)
            if (task := self._reading.pop(transfer, None)) is not None:
                task.cancel()
        return parcel

    def _start(self, parcel: Parcel, work: Callable[[], Awaitable[None]]) -> None:
        name = f"asynckv: transfer {parcel.transfer} of a pipe"
        self._reading[parcel.transfer] = self._tasks.start(work, name)

    async def _tell_sent(self, gpus: GpuSide, parcel: Parcel, kind: DigestMode) -> None:
        digest = await self._digest(gpus, parcel, kind)
        if self._by_gpu.get(parcel.transfer) is parcel:
            parcel.is_sent = True
            sent = Sent(parcel.transfer, 0, digest, kind, "nccl")
            self._send(sent, _NOTHING)

    async def _digest(self, gpus: GpuSide, parcel: Parcel, kind: DigestMode) -> bytes:
        if kind == "off":
            return b""
        read = gpus.pool.edges if kind == "edges" else gpus.pool.digest
        (digest,) = await read([parcel.place()])
        return digest

    async def _copy_to_host(self, parcel: Parcel) -> None:
        """Bring what is on the GPU to the host, and send it from there."""
        if self.gpus is None or parcel.spec is None:
            raise TypeError("a parcel that is nowhere")
        await self._memory.reach(parcel.nbytes)
        memory = self._memory.lending.spare(parcel.spec)
        (parcel.digest,) = await self.gpus.pool.copy(
            [parcel.place()], [memory], digest=self._link.digest != "off"
        )
        parcel.memory = memory
        parcel.leave_gpu()
        self._send_by_link(parcel)

    def _send_by_link(self, parcel: Parcel) -> None:
        if parcel.memory is None:
            raise TypeError("a parcel that is nowhere")

        if parcel.is_lent:
            self._lent.add(parcel.transfer)

        def done(digest: bytes, error: BaseException | None) -> None:
            self._lent.discard(parcel.transfer)
            if error is None:
                parcel.memory, parcel.is_sent = None, True
                self._send(Sent(parcel.transfer, 0, digest), _NOTHING)

        view = bytes_of(parcel.memory)
        digest = parcel.digest or None
        self._link.payload.send(parcel.transfer, 0, view, done, digest=digest)


_MAX_OUTGOING_BYTES: Final = 2**20


class Outbound:
    """What one side sends through a pipe, in order.

    ``send`` queues a frame on the pipe's stream, ``send_small`` one with the spec, the
    digest and the bytes of a small tensor; neither waits. ``failed`` is told what
    breaks the pipe.
    """

    def __init__(
        self,
        link: Link,
        send: Callable[[Frame, Buffer], None],
        send_small: Callable[[TensorSpec | None, bytes, Buffer], None],
        max_bytes: int,
        failed: Callable[[Exception], None] = lambda error: None,
    ) -> None:
        self.sent_bytes = 0
        self.sent_tensors = 0
        self.maybe_delivered = 0
        self._link = link
        self._send, self._send_small = send, send_small
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

    def share_memory(self, digest: Digest) -> MapSharing:
        """Let the peer read what is sent in memory of this side's, once it may."""
        self.leaving.mapping = MapSharing(self._link, self._memory, digest)
        return self.leaving.mapping

    def digests(self, nbytes: int) -> bool:
        """Is a tensor of so many bytes to be digested while it is copied?"""
        mapping = self.leaving.mapping if nbytes > INLINE_NBYTES else None
        is_later = mapping is not None and mapping.compares_edges
        return self._link.digest != "off" and not is_later

    async def memory_for(self, parcel: Parcel, spec: TensorSpec) -> torch.Tensor:
        """Return memory for the copy of a tensor that has its place.

        It comes back when it has left. A cancelled call leaves no trace.
        """
        await self._memory.reach(spec.nbytes)
        memory, parcel.shared = self._memory.lending.spare_region(spec)
        return memory

    def send_small(self, spec: TensorSpec | None, body: bytes, digest: bytes) -> bool:
        """Let a small tensor go at once, unless it has to wait for anything.

        It has to where others are before it, or there is no room, here or at the
        peer. Never waits. ``body`` are its bytes.
        """
        if self._queue or self._link.outgoing_bytes >= _MAX_OUTGOING_BYTES:
            return False
        parcel, nbytes = Parcel(spec), len(body)
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
    def is_reading_lent(self) -> bool:
        """Is there memory of the caller's that has not left?"""
        parcels = itertools.chain(self._queue, self._pushed)
        return any(one.is_lent and one.memory is not None for one in parcels)

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
            if parcel.nbytes > INLINE_NBYTES:
                self.leaving.forget(parcel)
                parcel.let_go()
            self.room.release(parcel)
            if parcel.watchers:
                parcel.settle(is_verified=True)
        self.room.advance()

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
        """As :meth:`aclose`, after the link's end. Never waits, but as long as a thread
        takes to let go of what was lent.
        """
        self.leaving.block_until_quiet()
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
        parcel.transfer = self._link.new_transfer()
        self.leaving.add(parcel)
        shown = self.leaving.show(parcel)
        if shown is not None:
            self._send(shown, b"")
            return
        on_gpu = parcel.memory is None and parcel.region is not None
        self._send(Push(parcel.transfer, 0, False, parcel.spec, b"", on_gpu), b"")

    def _push_small(self, parcel: Parcel) -> None:
        memory, parcel.memory, parcel.is_sent = parcel.memory, None, True
        body = b"" if memory is None else bytes_of(memory)
        self._send_small(parcel.spec, parcel.digest, body)

    def _last_copied(self) -> Parcel | None:
        for parcel in reversed(self._queue):
            if parcel.is_copied:
                return parcel
        return self._pushed[-1] if self._pushed else None
