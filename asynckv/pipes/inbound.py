"""The receiving half of a pipe: what the peer may send, and what waits to be taken.

The peer sends ahead of the application, up to a bound that it is told; a tensor above
the bound comes alone, and only when the application waits for it. Tensors land in
memory of this side. The peer is told what came, and what there is room for, once a tick
at most.
"""

from __future__ import annotations

import asyncio
import collections
from collections.abc import Callable
from typing import Final, NamedTuple

import torch

from asynckv.errors import ChecksumError, EndOfStream, PeerLost, RemoteProtocolError
from asynckv.links.link import LinkStream
from asynckv.pipes.arrivals import Arrival, Grants, SmallArrival
from asynckv.pipes.outbound import INLINE_NBYTES, MAX_TENSORS
from asynckv.protocol.codec import Buffer
from asynckv.protocol.frames import Flushed, Frame, Push, Read
from asynckv.protocol.wire import digest_of
from asynckv.tensors.views import (
    MISSING_DTYPES,
    bytes_of,
    check_into,
    empty_tensor,
    tensor_from,
)
from asynckv.types import TensorSpec

__all__ = (
    "Inbound",
    "Reports",
)


_SHARE: Final = 4
"""Room is said with so large a part of the bound: a quarter."""

_LATEST_S: Final = 0.005


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
    """What one side receives through a pipe, in order, by ``stream``.

    ``broke`` is told, on the loop, of bytes that changed on their way: nothing
    behind them is received.
    """

    def __init__(
        self,
        stream: LinkStream,
        max_bytes: int,
        broke: Callable[[ChecksumError], None],
    ) -> None:
        self.max_bytes = max_bytes
        self.held_bytes = 0
        self.received_bytes = 0
        self.received_tensors = 0
        self._link = stream.link
        self._broke = broke
        self._queue: collections.deque[Arrival | SmallArrival] = collections.deque()
        self._unverified: collections.deque[Arrival | SmallArrival] = (
            collections.deque()
        )
        self.reports = Reports(stream.send, max_bytes)
        self._loop = asyncio.get_running_loop()
        self._waiting: asyncio.Future[None] | None = None
        """The one who waits for the next tensor."""
        self._spare: _Spare | None = None
        self._last_small: TensorSpec | None = None
        self.granting = Grants(
            *(stream, max_bytes),
            landed=self._verified,
            failed=self._fail,
            changed=self._wake,
        )
        """What of it comes to where."""
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
        if not isinstance(arrival, Arrival):
            raise TypeError("a small tensor is nowhere else")
        check_into(into, arrival.spec, "tensor")
        try:
            await self.granting.read(arrival, into)
        except ChecksumError as exc:
            self._fail(arrival, exc.message)
            raise self._failure() from None
        except PeerLost:
            if self._lost is None:
                self.granting.try_to_grant(arrival)
            return False
        except BaseException:
            if arrival in self._unverified:  # it comes though nobody asks for it now
                self.granting.let_come(arrival)
            raise
        if self._queue and self._queue[0] is arrival:
            self._verified(arrival)
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
        arrival.release()
        self.reports.owe(arrival.nbytes, 1)

    def check(self, arrival: Arrival | SmallArrival) -> None:
        """Raise what :meth:`take` would. Never waits."""
        if not self._queue or self._queue[0] is not arrival:
            raise self._failure()

    def on_push(self, frame: Push, body: bytes) -> None:
        """The next tensor is here, or comes.

        :raises RemoteProtocolError: it makes no sense, or there is no room for it
        """
        spec = frame.spec
        nbytes = 0 if spec is None else spec.nbytes
        self.reports.charge(nbytes)
        if len(body) != (nbytes if frame.inline else 0):
            raise RemoteProtocolError("a pushed tensor has not its declared size")
        if frame.inline is not (nbytes <= INLINE_NBYTES):
            raise RemoteProtocolError("a large tensor came along, or a small one not")
        if spec is not None and spec.dtype in MISSING_DTYPES:
            raise RemoteProtocolError(f"a pushed {spec.dtype}, unknown to this torch")
        self.held_bytes += nbytes
        if frame.inline:
            self._take_in(SmallArrival(spec, body, nbytes), frame.digest)
        elif spec is not None:
            arrival = Arrival(frame, spec)
            self._queue.append(arrival)
            self._unverified.append(arrival)
            self.granting.expect(arrival)
            self._wake()

    def _take_in(self, arrival: SmallArrival, digest: bytes) -> None:
        self._queue.append(arrival)
        is_digested = arrival.spec is not None and self._link.digest != "off"
        if is_digested and digest != digest_of(arrival.body):
            self._unverified.append(arrival)
            self._fail(arrival, "a tensor arrived with other bytes than were sent")
            return
        self._wake()  # first: what it sends says more
        if self._unverified:
            self._unverified.append(arrival)
        else:
            self.reports.verified(1)

    def _verified(self, arrival: Arrival) -> None:
        """All bytes of it are here, and are those that were sent."""
        arrival.is_verified = True
        self.granting.end(arrival)
        count = 0
        while self._unverified and self._unverified[0].is_verified:
            self._unverified.popleft()
            count += 1
        self._wake()
        self.reports.verified(count)

    def _fail(self, arrival: Arrival | SmallArrival, message: str) -> None:
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
                arrival.release()
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
