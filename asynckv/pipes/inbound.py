"""The receiving half of a pipe: what the peer may send, and what waits to be taken.

The peer sends ahead of the application, up to a bound that it is told; a tensor above
the bound comes alone, and only when the application waits for it. Tensors land in
memory of this side. The peer is told what came, and what there is room for, once a tick
at most.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
from collections.abc import Callable
from typing import Final, NamedTuple

import torch

from asynckv.errors import ChecksumError, EndOfStream, PeerLost, RemoteProtocolError
from asynckv.links.link import Link
from asynckv.pipes.arrivals import Arrival, SmallArrival
from asynckv.pipes.gpu_side import GpuSide
from asynckv.pipes.map_sharing import MapSharing
from asynckv.pipes.parcels import INLINE_NBYTES, MAX_TENSORS
from asynckv.pipes.read_ahead import ReadAhead
from asynckv.protocol.codec import Buffer
from asynckv.protocol.frames import Flushed, Frame, Push, PushSmall, Read
from asynckv.protocol.transfer_frames import (
    Grant,
    PushMapped,
    PushShared,
    Sent,
)
from asynckv.protocol.wire import digest_of
from asynckv.tensors.growth import Growth
from asynckv.tensors.views import (
    MISSING_DTYPES,
    bytes_of,
    check_into,
    empty_tensor,
    tensor_from,
)
from asynckv.transfers.reception import Reception
from asynckv.types import TensorSpec

__all__ = (
    "Granting",
    "Inbound",
    "Reports",
)


_NOTHING: Final = b""

_SHARE: Final = 4
"""Room is said with so large a part of the bound: a quarter."""

_LATEST_S: Final = 0.005


class Granting:
    """Grants what the peer has announced memory to land in: of a GPU, or of the host.

    What finds none comes when :meth:`grant` is called for it again. ``granted`` is told
    when what has waited for a slab was granted.
    """

    def __init__(
        self,
        link: Link,
        send: Callable[[Frame, Buffer], None],
        max_bytes: int,
        granted: Callable[[], None],
    ) -> None:
        self.gpus: GpuSide | None = None
        self.mapping: MapSharing | None = None
        self.ahead = ReadAhead(self.try_to_grant)
        self._link, self._send, self._granted = link, send, granted
        self._max_bytes = max_bytes
        self._memory = Growth(max_bytes, self._grant_waiting)
        self._landing: dict[int, Arrival] = {}
        self._to_grant: dict[Arrival, None] = {}
        """What waits for a slab, the first one first."""

    def expect(self, arrival: Arrival) -> None:
        """It was announced: let it land, unless it is above the bound. Never waits."""
        self._link.payload.announce(arrival.transfer)
        if arrival.nbytes > self._max_bytes:
            return
        if self.can_read(arrival):
            self.ahead.add(arrival)
        else:
            self.try_to_grant(arrival)

    def can_read(self, arrival: Arrival | SmallArrival) -> bool:
        """Can it be copied from where the peer shows it, and is it not yet?"""
        if not isinstance(arrival, Arrival) or arrival.mapped is None:
            return False
        is_shown = self.mapping is not None and self.mapping.can_read
        return is_shown and not (arrival.is_landing or arrival.is_verified)

    async def read(self, arrival: Arrival, into: torch.Tensor) -> None:
        """Copy it from where the peer shows it, as :meth:`MapSharing.read`."""
        if arrival.mapped is None or self.mapping is None:
            raise PeerLost("the peer shows it nowhere")
        self.ahead.forget(arrival)
        self.ahead.is_paused = arrival.is_read_out = True
        try:
            await self.mapping.read(arrival.mapped, into)
        finally:
            self.ahead.is_paused = arrival.is_read_out = False

    def try_to_grant(self, arrival: Arrival) -> None:
        """As :meth:`grant`; without memory it comes when it is waited for."""
        with contextlib.suppress(MemoryError):
            self.grant(arrival)

    def grant(self, arrival: Arrival) -> None:
        """Let it land, unless it does already. Never waits.

        :raises MemoryError: there is none for a tensor above the bound
        """
        if arrival.spec is None or arrival.is_landing or self._lands_on_gpu(arrival):
            return
        if self._memory.awaits(arrival.nbytes):
            self._to_grant[arrival] = None
            return
        try:
            arrival.tensor = self._memory.lending.spare(arrival.spec)
        except RuntimeError as exc:
            raise MemoryError(f"none for a tensor of {arrival.nbytes} bytes") from exc
        self.ahead.forget(arrival)
        if self.mapping is not None and arrival.read_mapped(self.mapping):
            return
        arrival.reception = Reception(self._link, arrival.transfer, arrival)
        self._landing[arrival.transfer] = arrival
        arrival.reception.begin(bytes_of(arrival.tensor))
        self._send(Grant(arrival.transfer), _NOTHING)

    def check_shown(self, frame: PushShared) -> None:
        """Raise if the peer shows what is not within its memory."""
        if self.gpus is not None:
            nbytes = frame.spec.nbytes
            self.gpus.sharing.peer_memory.check(frame.offset, nbytes)

    def check_mapped(self, frame: PushMapped) -> None:
        """Raise if the peer shows what is not in its memory, or is shown already."""
        if self.mapping is None:
            raise RemoteProtocolError("a tensor in memory that is not mapped")
        self.mapping.claim(frame)

    def on_sent(self, frame: Sent) -> None:
        """The peer has sent a tensor's last byte."""
        arrival = self._landing.get(frame.transfer)
        if arrival is None or arrival.reception is None:
            raise RemoteProtocolError("a Sent for what was never granted")
        arrival.reception.on_sent(frame)

    def on_routed_sent(self, frame: Sent) -> None:
        """The peer has sent a tensor's last byte from its GPU to this one's."""
        arrival = self._landing.get(frame.transfer)
        if arrival is None:
            raise RemoteProtocolError("a tensor of a GPU that was never granted")
        arrival.on_routed_sent(frame)

    def landed(self, arrival: Arrival) -> None:
        """It is whole."""
        arrival.reception = None
        self._landing.pop(arrival.transfer, None)
        self._let_go(arrival)

    def forget(self, arrival: Arrival) -> None:
        """Nobody wants it any more, and it lands no further. Never waits."""
        self._to_grant.pop(arrival, None)
        if arrival.reception is not None:
            arrival.reception.stop()
        arrival.let_go()
        self._landing.pop(arrival.transfer, None)
        self.ahead.forget(arrival)
        self._let_go(arrival)

    async def aclose(self) -> None:
        """Give idle memory back. Bounded; what was taken keeps its own."""
        await self._memory.aclose()

    def abort(self) -> None:
        """As :meth:`aclose`, but never waits."""
        self._memory.close()

    def _lands_on_gpu(self, arrival: Arrival) -> bool:
        """Let it land in memory of the GPU, if that can be."""
        if self.gpus is None:
            return False
        if arrival.read_on_gpu(self.gpus):
            return True
        if (granted := arrival.land_on_gpu(self._link, self.gpus)) is None:
            return False
        self._landing[arrival.transfer] = arrival
        self._send(granted, _NOTHING)
        return True

    def _let_go(self, arrival: Arrival) -> None:
        if self.mapping is not None and arrival.mapped is not None:
            self.mapping.release(arrival.mapped.place)

    def _grant_waiting(self) -> None:
        waiting, self._to_grant = self._to_grant, {}
        for arrival in waiting:
            self.try_to_grant(arrival)
        if waiting:
            self._granted()


class Reports:
    """Counts what the peer was told, and what it is to be told next.

    It may send what it was told that there is room for; a tensor above ``max_bytes``
    when all of that is free. What is whole is said at the end of the tick, and new room
    with a quarter of the bound, or 5 ms later: for as long a peer may wait whose next
    tensor takes more than the other three quarters.
    """

    def __init__(self, send: Callable[[Frame, Buffer], None], max_bytes: int) -> None:
        self._send = send
        self._max_bytes = max_bytes
        self._credit_bytes = 0
        self._credit_tensors = 0
        self._owed_bytes = 0
        self._owed_tensors = 0
        self._verified_count = 0
        self._reported_count = 0
        self._loop = asyncio.get_running_loop()
        self._is_due = False
        self._is_over = False
        self._latest: asyncio.TimerHandle | None = None

    def charge(self, nbytes: int) -> None:
        """A tensor of so many bytes comes.

        :raises RemoteProtocolError: the peer was not told that there is room for it
        """
        told_unread = self._max_bytes - self._credit_bytes
        if self._credit_tensors < 1 or (nbytes > self._credit_bytes and told_unread):
            raise RemoteProtocolError("a tensor for which there is no room")
        self._credit_bytes -= nbytes
        self._credit_tensors -= 1

    def owe(self, nbytes: int, tensors: int) -> None:
        """There is room for so many more."""
        self._owed_bytes += nbytes
        self._owed_tensors += tensors
        if self._owes_much():
            self._tell_soon()
        elif self._latest is None and not self._is_over:
            self._latest = self._loop.call_later(_LATEST_S, self._tell_room)

    def verified(self, tensors: int) -> None:
        """So many more are whole, in their order."""
        self._verified_count += tensors
        self._tell_soon()

    def tell(self) -> None:
        """Say now what is due."""
        if self._verified_count > self._reported_count:
            self._reported_count = self._verified_count
            self._send(Flushed(self._verified_count), b"")
        if self._owes_much():
            self._tell_room()

    def take_verified(self) -> int:
        """Return how many are whole, which somebody else says now; 0 if it was said."""
        count = self._verified_count
        if count == self._reported_count:
            return 0
        self._reported_count = count
        return count

    def end(self) -> None:
        """Say nothing more, unless :meth:`tell` is called."""
        self._is_over = True
        self._forget_latest()

    def _owes_much(self) -> bool:
        return (
            self._owed_bytes * _SHARE >= self._max_bytes
            or self._owed_tensors * _SHARE >= MAX_TENSORS
        )

    def _tell_room(self) -> None:
        self._forget_latest()
        if self._owed_tensors:
            read = Read(self._owed_bytes, self._owed_tensors)
            self._credit_bytes += read.nbytes
            self._credit_tensors += read.tensors
            self._owed_bytes = self._owed_tensors = 0
            self._send(read, b"")

    def _tell_soon(self) -> None:
        if not self._is_due and not self._is_over:
            self._is_due = True
            self._loop.call_soon(self._tell_due)

    def _tell_due(self) -> None:
        self._is_due = False
        if not self._is_over:
            self.tell()

    def _forget_latest(self) -> None:
        if self._latest is not None:
            self._latest.cancel()
            self._latest = None


class _Spare(NamedTuple):
    """A tensor that nobody has yet: after a wake-up it costs several times as much."""

    spec: TensorSpec
    tensor: torch.Tensor
    memory: memoryview


class Inbound:
    """What one side receives through a pipe, in order.

    ``broke`` is told, on the loop, of bytes that changed on their way: nothing
    behind them is received.
    """

    def __init__(
        self,
        link: Link,
        send: Callable[[Frame, Buffer], None],
        max_bytes: int,
        broke: Callable[[ChecksumError], None],
    ) -> None:
        self.max_bytes = max_bytes
        self.held_bytes = 0
        self.received_bytes = 0
        self.received_tensors = 0
        self._link = link
        self._broke = broke
        self._queue: collections.deque[Arrival | SmallArrival] = collections.deque()
        self._unverified: collections.deque[Arrival | SmallArrival] = (
            collections.deque()
        )
        self.reports = Reports(send, max_bytes)
        self._loop = asyncio.get_running_loop()
        self._waiting: asyncio.Future[None] | None = None
        """The one who waits for the next tensor."""
        self._spare: _Spare | None = None
        self._last_small: TensorSpec | None = None
        self.granting = Granting(link, send, max_bytes, self._wake)
        """What of it lands where."""
        self._lost: PeerLost | None = None
        self._was_cut = False
        self._checksum: ChecksumError | None = None

    @property
    def held_tensors(self) -> int:
        """How many were announced and not taken."""
        return len(self._queue)

    def open(self) -> None:
        """Let the peer send. Never waits."""
        self.reports.owe(self.max_bytes, MAX_TENSORS)

    async def head(self, into: torch.Tensor | None = None) -> Arrival | SmallArrival:
        """Wait for the next tensor; it stays in the stream until it is taken.

        It is whole, or, if it is wanted ``into`` memory, it may be one to :meth:`read`.

        To be called by one task at a time. A cancelled call leaves no trace.

        :raises EndOfStream: the pipe was closed and everything was taken
        :raises PeerLost: the connection ended in any other way
        :raises ChecksumError: the next tensor's bytes changed on their way
        :raises MemoryError: there is none for a tensor above the bound
        """
        self.granting.ahead.asked(into=into is not None)
        while not self._queue or not self._is_ready(self._queue[0], into):
            if self._lost is not None:
                raise self._failure()
            if self._queue:
                self._grant(self._queue[0])
            elif self._last_small is not None:
                self._make_spare(self._last_small)
            self._waiting = self._loop.create_future()
            try:
                await self._waiting
            finally:
                self._waiting = None
        return self._queue[0]

    async def read(self, arrival: Arrival | SmallArrival, into: torch.Tensor) -> bool:
        """Copy the first tensor ``into`` memory from where the peer shows it.

        Returns false if it cannot be read there: then it comes otherwise. A cancelled
        call ends when no thread is at ``into``; the tensor stays in the stream.

        :raises ChecksumError: the bytes there are not those that were sent
        :raises PeerLost: the connection ended meanwhile
        :raises ValueError: ``into`` does not fit
        """
        if not isinstance(arrival, Arrival) or arrival.spec is None:
            raise TypeError("a small tensor is nowhere else")
        check_into(into, arrival.spec, "tensor")
        try:
            await self.granting.read(arrival, into)
        except ChecksumError as exc:
            self.fail(arrival, exc.message)
            raise self._failure() from None
        except PeerLost:
            self.land_again(arrival)
            return False
        if self._queue and self._queue[0] is arrival:
            self.verified(arrival)
        return True

    def tensor_of(self, arrival: Arrival | SmallArrival) -> torch.Tensor | None:
        """Return a tensor of host memory that is whole; it stays in the stream."""
        if isinstance(arrival, Arrival):
            return arrival.tensor
        body, spec = arrival.body, arrival.spec
        if spec is None:
            return None
        spare, self._last_small = self._spare, spec
        if spare is None or spare.spec != spec:
            return tensor_from(body, spec)
        self._spare = None
        spare.memory[:] = body
        return spare.tensor

    def take(self, arrival: Arrival | SmallArrival) -> None:
        """Take the first tensor out of the stream. Never waits.

        :raises EndOfStream: the pipe was closed on this side meanwhile
        :raises PeerLost: it was aborted on this side meanwhile
        """
        if not self._queue or self._queue[0] is not arrival:
            raise self._failure()
        self._queue.popleft()
        self.held_bytes -= arrival.nbytes
        self.received_bytes += arrival.nbytes
        self.received_tensors += 1
        arrival.let_go()
        self.reports.owe(arrival.nbytes, 1)

    def check(self, arrival: Arrival | SmallArrival) -> None:
        """Raise what :meth:`take` would. Never waits."""
        if not self._queue or self._queue[0] is not arrival:
            raise self._failure()

    def on_push(self, frame: Push, body: bytes) -> None:
        """The next tensor comes by payload."""
        if frame.inline:
            raise RemoteProtocolError("a large tensor that is to ride along")
        self._await(self._announced(frame), body)

    def on_push_small(self, frame: PushSmall, body: bytes) -> None:
        """The next tensor is here."""
        spec, nbytes = frame.spec, len(body)
        self.reports.charge(nbytes)
        if nbytes != (0 if spec is None else spec.nbytes) or nbytes > INLINE_NBYTES:
            raise RemoteProtocolError("a pushed tensor has not its declared size")
        if spec is not None and spec.dtype in MISSING_DTYPES:
            raise RemoteProtocolError(f"a pushed {spec.dtype}, unknown to this torch")
        self.held_bytes += nbytes
        arrival = SmallArrival(spec, body, nbytes)
        self._queue.append(arrival)
        digested = spec is not None and self._link.digest != "off"
        if digested and frame.digest != digest_of(body):
            self._unverified.append(arrival)
            self.fail(arrival, "a tensor arrived with other bytes than were sent")
            return
        self._wake()  # first: what it sends says more
        if self._unverified:
            self._unverified.append(arrival)
        else:
            self.reports.verified(1)

    def on_push_shared(self, frame: PushShared, body: bytes) -> None:
        """The next tensor lies in memory of the peer's that this side can read."""
        self.granting.check_shown(frame)
        self._await(self._announced(frame), body)

    def on_push_mapped(self, frame: PushMapped, body: bytes) -> None:
        """The next tensor lies in memory of the peer's that this side has mapped."""
        self.granting.check_mapped(frame)
        self._await(self._announced(frame), body)

    def land_again(self, arrival: Arrival) -> None:
        """It cannot come from GPU to GPU: let it come through host memory."""
        if self._lost is None:
            self.granting.try_to_grant(arrival)
            self._wake()

    def verified(self, arrival: Arrival) -> None:
        """All bytes of it are here, and are those that were sent."""
        arrival.is_verified = True
        self.granting.landed(arrival)
        count = 0
        while self._unverified and self._unverified[0].is_verified:
            self._unverified.popleft()
            count += 1
        self._wake()
        self.reports.verified(count)

    def fail(self, arrival: Arrival | SmallArrival, message: str) -> None:
        """Its bytes changed on their way: what came before it is still good."""
        if self._lost is None:
            self._checksum = ChecksumError(message, hint="the pipe is broken")
            while self._queue[-1] is not arrival:
                self._cut()
            self._broke(self._checksum)

    def end(self, error: PeerLost, *, keep: bool = True) -> None:
        """Nothing comes any more. Never waits; only the first call counts.

        What has come whole can still be taken, unless ``keep`` is false.
        """
        if self._lost is None:
            self._lost = error
            self._was_cut = bool(self._unverified)
        while self._unverified and self._queue:
            self._cut()
        if not keep:
            for arrival in self._queue:
                arrival.let_go()
            self._queue.clear()
            self.held_bytes = 0
            self._was_cut = False
        self.reports.end()
        self._wake()

    def _failure(self) -> Exception:
        if self._checksum is not None:
            return ChecksumError(self._checksum.message, hint=self._checksum.hint)
        lost = self._lost or PeerLost("the pipe is over")
        if lost.goodbye and not self._was_cut:
            return EndOfStream(lost.message)
        error = PeerLost(lost.message, hint=lost.hint)
        error.__cause__ = lost.__cause__
        return error

    def _announced(self, frame: Push | PushShared | PushMapped) -> Arrival:
        """Put a tensor that comes into the stream."""
        arrival = Arrival(self, frame)
        self.reports.charge(arrival.nbytes)
        self.held_bytes += arrival.nbytes
        if arrival.spec is not None and arrival.spec.dtype in MISSING_DTYPES:
            dtype = arrival.spec.dtype
            raise RemoteProtocolError(f"a pushed {dtype}, unknown to this torch")
        self._queue.append(arrival)
        self._unverified.append(arrival)
        return arrival

    def _await(self, arrival: Arrival, body: bytes) -> None:
        if body or arrival.nbytes <= INLINE_NBYTES:
            raise RemoteProtocolError("a small tensor that did not ride along")
        self.granting.expect(arrival)
        self._wake()

    def _is_ready(
        self, arrival: Arrival | SmallArrival, into: torch.Tensor | None
    ) -> bool:
        if arrival.is_verified:
            return True
        return into is not None and self.granting.can_read(arrival)

    def _grant(self, arrival: Arrival | SmallArrival) -> None:
        if isinstance(arrival, Arrival):
            self.granting.grant(arrival)

    def _wake(self) -> None:
        """Who waits for the next tensor looks again."""
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    def _make_spare(self, spec: TensorSpec) -> None:
        """Make a tensor such as the last one was, while there is time."""
        if self._spare is None or self._spare.spec != spec:
            tensor = empty_tensor(spec)
            self._spare = _Spare(spec, tensor, bytes_of(tensor))

    def _cut(self) -> None:
        """Forget the last tensor, which is not whole or follows one that is not."""
        arrival = self._queue.pop()
        if isinstance(arrival, Arrival):
            self.granting.forget(arrival)
        if self._unverified and self._unverified[-1] is arrival:
            self._unverified.pop()
        self.held_bytes -= arrival.nbytes
