"""The receiving half of a pipe: what the peer may send, and what waits to be taken.

The peer sends ahead of the application, up to a bound that it is told; a tensor
above the bound comes alone, and only when the application waits for it.
"""

from __future__ import annotations

import asyncio
import collections
from collections.abc import Callable

from asynckv.errors import ChecksumError, EndOfStream, PeerLost, RemoteProtocolError
from asynckv.links.link import Link
from asynckv.pipes.arrivals import Arrival
from asynckv.pipes.granting import Granting
from asynckv.pipes.parcels import INLINE_NBYTES, MAX_TENSORS
from asynckv.pipes.reports import Reports
from asynckv.protocol.digests import digest_of
from asynckv.protocol.frames import Frame, Push
from asynckv.protocol.ipc_frames import PushShared
from asynckv.tensors.views import bytes_of, dtype_of, empty_tensor

__all__ = ("Inbound",)


class Inbound:
    """What one side receives through a pipe, in order.

    ``broke`` is told, on the loop, of bytes that changed on their way: nothing
    behind them is received.
    """

    def __init__(
        self,
        link: Link,
        send: Callable[[Frame, memoryview], None],
        max_bytes: int,
        broke: Callable[[ChecksumError], None],
    ) -> None:
        self.max_bytes = max_bytes
        self.held_bytes = 0
        self.received_bytes = 0
        self.received_tensors = 0
        self._link = link
        self._broke = broke
        self._queue: collections.deque[Arrival] = collections.deque()
        self._unverified: collections.deque[Arrival] = collections.deque()
        self.reports = Reports(send, max_bytes)
        self._changed = asyncio.Event()
        self.granting = Granting(link, send, max_bytes, self._changed.set)
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

    async def head(self) -> Arrival:
        """Wait for the next tensor; it stays in the stream until it is taken.

        To be called by one task at a time. A cancelled call leaves no trace.

        :raises EndOfStream: the pipe was closed and everything was taken
        :raises PeerLost: the connection ended in any other way
        :raises ChecksumError: the next tensor's bytes changed on their way
        :raises MemoryError: there is none for a tensor above the bound
        """
        while not self._queue or not self._queue[0].is_verified:
            if self._lost is not None:
                raise self._failure()
            if self._queue:
                self.granting.grant(self._queue[0])
            self._changed.clear()
            await self._changed.wait()
        return self._queue[0]

    def take(self, arrival: Arrival) -> None:
        """Take the first tensor out of the stream. Never waits.

        :raises EndOfStream: the pipe was closed on this side meanwhile
        :raises PeerLost: it was aborted on this side meanwhile
        """
        self.check(arrival)
        self._queue.popleft()
        self.held_bytes -= arrival.nbytes
        self.received_bytes += arrival.nbytes
        self.received_tensors += 1
        arrival.let_go()
        self.reports.owe(arrival.nbytes, 1)

    def check(self, arrival: Arrival) -> None:
        """Raise what :meth:`take` would. Never waits."""
        if not self._queue or self._queue[0] is not arrival:
            raise self._failure()

    def on_push(self, frame: Push, body: bytes) -> None:
        """The next tensor comes, with its bytes if they are few."""
        arrival = self._announced(frame)
        if arrival.spec is None or frame.inline:
            self._take_inline(arrival, frame, body)
        else:
            self._await(arrival, body)

    def on_push_shared(self, frame: PushShared, body: bytes) -> None:
        """The next tensor lies in memory of the peer's that this side can read."""
        self.granting.check_shown(frame)
        self._await(self._announced(frame), body)

    def land_again(self, arrival: Arrival) -> None:
        """It cannot come from GPU to GPU: let it come through host memory."""
        if self._lost is None:
            self.granting.try_to_grant(arrival)
            self._changed.set()

    def verified(self, arrival: Arrival) -> None:
        """All bytes of it are here, and are those that were sent."""
        arrival.is_verified = True
        self.granting.landed(arrival)
        count = 0
        while self._unverified and self._unverified[0].is_verified:
            self._unverified.popleft()
            count += 1
        self.reports.verified(count)
        self._changed.set()

    def fail(self, arrival: Arrival, message: str) -> None:
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
        self._changed.set()

    def _failure(self) -> Exception:
        if self._checksum is not None:
            return ChecksumError(self._checksum.message, hint=self._checksum.hint)
        lost = self._lost or PeerLost("the pipe is over")
        if lost.goodbye and not self._was_cut:
            return EndOfStream(lost.message)
        error = PeerLost(lost.message, hint=lost.hint)
        error.__cause__ = lost.__cause__
        return error

    def _announced(self, frame: Push | PushShared) -> Arrival:
        """Put a tensor that comes into the stream."""
        arrival = Arrival(self, frame)
        self.reports.charge(arrival.nbytes)
        self.held_bytes += arrival.nbytes
        if arrival.spec is not None:
            try:
                dtype_of(arrival.spec.dtype)
            except ValueError as exc:
                raise RemoteProtocolError(f"a pushed tensor: {exc}") from exc
        self._queue.append(arrival)
        self._unverified.append(arrival)
        return arrival

    def _await(self, arrival: Arrival, body: bytes) -> None:
        if body or arrival.nbytes <= INLINE_NBYTES:
            raise RemoteProtocolError("a small tensor that did not ride along")
        self.granting.expect(arrival)
        self._changed.set()

    def _take_inline(self, arrival: Arrival, frame: Push, body: bytes) -> None:
        if len(body) != arrival.nbytes or arrival.nbytes > INLINE_NBYTES:
            raise RemoteProtocolError("a pushed tensor has not its declared size")
        if arrival.spec is not None:
            if self._link.digest != "off" and frame.digest != digest_of(body):
                self.fail(arrival, "a tensor arrived with other bytes than were sent")
                return
            arrival.tensor = empty_tensor(arrival.spec)
            bytes_of(arrival.tensor)[:] = body
        self.verified(arrival)

    def _cut(self) -> None:
        """Forget the last tensor, which is not whole or follows one that is not."""
        arrival = self._queue.pop()
        self.granting.forget(arrival)
        if self._unverified and self._unverified[-1] is arrival:
            self._unverified.pop()
        self.held_bytes -= arrival.nbytes
