"""The sending half of a pipe: room, order, and what the peer is known to have.

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
from asynckv.protocol.frames import Done, Flushed, Frame, Grant, Push, Read
from asynckv.tensors.views import bytes_of
from asynckv.types import TensorSpec

__all__ = ("INLINE_NBYTES", "MAX_TENSORS", "Outbound", "Parcel")

INLINE_NBYTES: Final = 64 * 1024
"""A tensor of so many bytes rides with its frame."""

MAX_TENSORS: Final = 4096
"""So many tensors are in flight, or wait to be received, however small."""

_MAX_OUTGOING_BYTES: Final = 2**20
_ENDS_WITH: Final = "the peer's memory having what was sent before, or its end"


class Parcel:
    """One tensor, or None, on its way to the peer.

    ``memory`` is the pipe's own copy, while it is still needed.
    """

    __slots__ = (
        "digest",
        "has_room",
        "is_copied",
        "memory",
        "nbytes",
        "spec",
        "transfer",
        "turn",
        "watchers",
    )

    def __init__(self, spec: TensorSpec | None) -> None:
        self.spec = spec
        self.nbytes = 0 if spec is None else spec.nbytes
        self.memory: torch.Tensor | None = None
        self.digest = b""
        self.has_room = False
        self.is_copied = False
        self.transfer = 0
        self.turn: asyncio.Future[None] | None = None
        self.watchers: list[asyncio.Future[bool]] = []


class Outbound:
    """What one side sends through a pipe, in order.

    ``send`` queues a frame on the pipe's stream and never waits.
    """

    def __init__(
        self, link: Link, send: Callable[[Frame, memoryview], None], max_bytes: int
    ) -> None:
        self.max_bytes = max_bytes
        self.in_flight_bytes = 0
        self.in_flight_tensors = 0
        self.sent_bytes = 0
        self.sent_tensors = 0
        self.room_waits = 0
        self.maybe_delivered = 0
        self._link = link
        self._send = send
        self._line: collections.deque[Parcel] = collections.deque()
        self._queue: collections.deque[Parcel] = collections.deque()
        self._pushed: collections.deque[Parcel] = collections.deque()
        self._to_grant: dict[int, Parcel] = {}
        self._verified_count = 0
        self._window_bytes: int | None = None
        self._credit_bytes = 0
        self._credit_tensors = 0
        self._awaits_drain = False
        self._is_refusing = False
        self._lost: PeerLost | None = None

    @property
    def waiting(self) -> int:
        """How many wait for room."""
        return len(self._line)

    # What the application does.

    async def reserve(self, parcel: Parcel) -> None:
        """Wait for room, behind those who asked before, and take a place.

        Whoever fails or is cancelled here or later calls :meth:`drop`.

        :raises PipeBroken: the peer is lost
        :raises EndOfStream: one of the sides has closed the pipe
        """
        self.check()
        self._line.append(parcel)
        self._admit()
        if not parcel.has_room:
            self.room_waits += 1
            parcel.turn = asyncio.get_running_loop().create_future()
            who = f"send_tensor of {parcel.nbytes} bytes"
            room = f"room in a pipe of {self.max_bytes} bytes in flight"
            with LoggedWait(who, room, _ENDS_WITH):
                await parcel.turn
        self.check()

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
        if parcel.has_room:
            self._queue.remove(parcel)
            self._release(parcel)
        elif parcel in self._line:
            self._line.remove(parcel)
        self._admit()
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
            what = f"{self.in_flight_bytes} bytes to be in the peer's memory"
            with LoggedWait("flush", what, "the peer's recv_tensor, or its end"):
                if await watcher:
                    return
        if self._lost is not None and (self.maybe_delivered or not self._lost.goodbye):
            raise self._failure()

    def refuse(self) -> None:
        """Take no more; what was put still leaves. Never waits."""
        self._is_refusing = True
        self._wake_line()

    def check(self) -> None:
        """Raise what a sender has to know.

        :raises PipeBroken: the peer is lost
        :raises EndOfStream: one of the sides has closed the pipe
        """
        if self._lost is not None:
            raise self._failure()
        if self._is_refusing:
            raise EndOfStream("the pipe was closed on this side")

    # What the peer says.

    def on_read(self, frame: Read) -> None:
        """The peer has room for more."""
        if self._window_bytes is None:
            self._window_bytes = frame.nbytes
        self._credit_bytes += frame.nbytes
        self._credit_tensors += frame.tensors
        self._advance()

    def on_grant(self, frame: Grant) -> None:
        """The peer's memory is ready for a tensor."""
        parcel = self._to_grant.pop(frame.transfer, None)
        if parcel is None or parcel.memory is None:
            raise RemoteProtocolError("a Grant for what waits for none")

        def done(digest: bytes, error: BaseException | None) -> None:
            if error is None:
                parcel.memory = None
                self._send(Done(parcel.transfer, 0, digest), memoryview(b""))

        self._link.payload.send(
            parcel.transfer,
            0,
            bytes_of(parcel.memory),
            done,
            digest=parcel.digest or None,
        )

    def on_flushed(self, frame: Flushed) -> None:
        """The peer's memory holds everything up to there."""
        count = frame.tensors - self._verified_count
        if not 0 <= count <= len(self._pushed):
            raise RemoteProtocolError("a Flushed for what was never sent")
        for _ in range(count):
            parcel = self._pushed.popleft()
            if parcel.memory is not None:
                raise RemoteProtocolError("a Flushed for what is still on its way")
            self._verified_count += 1
            self._release(parcel)
            _settle(parcel, True)
        self._admit()

    def end(self, error: PeerLost) -> None:
        """Nothing leaves any more. Never waits; only the first call counts."""
        if self._lost is not None:
            return
        self._lost = error
        given_up = [*self._pushed, *(p for p in self._queue if p.is_copied)]
        self.maybe_delivered = len(given_up)
        self._pushed.clear()
        self._to_grant.clear()
        self._queue = collections.deque(p for p in self._queue if not p.is_copied)
        for parcel in given_up:
            # The transport keeps the memory for as long as a thread reads it.
            parcel.memory = None
            self._release(parcel)
            _settle(parcel, False)
        self._wake_line()

    # Changes of state.

    def _failure(self) -> PipeBroken | EndOfStream:
        lost = self._lost
        if lost is None or (lost.goodbye and not self.maybe_delivered):
            return EndOfStream(lost.message if lost else "the pipe is closed")
        broken = PipeBroken(
            lost.message, maybe_delivered=self.maybe_delivered, hint=lost.hint
        )
        broken.__cause__ = lost.__cause__
        return broken

    def _fits(self, parcel: Parcel) -> bool:
        if self.in_flight_tensors >= MAX_TENSORS:
            return False
        nbytes = self.in_flight_bytes + parcel.nbytes
        return nbytes <= self.max_bytes or not self.in_flight_bytes

    def _admit(self) -> None:
        if self._lost is not None or self._is_refusing:
            return
        while self._line and self._fits(self._line[0]):
            parcel = self._line.popleft()
            parcel.has_room = True
            self.in_flight_bytes += parcel.nbytes
            self.in_flight_tensors += 1
            self._queue.append(parcel)
            _wake(parcel)

    def _release(self, parcel: Parcel) -> None:
        self.in_flight_bytes -= parcel.nbytes
        self.in_flight_tensors -= 1

    def _wake_line(self) -> None:
        line, self._line = self._line, collections.deque()
        for parcel in line:
            _wake(parcel)

    def _advance(self) -> None:
        while self._queue and self._queue[0].is_copied and self._may_push():
            self._push(self._queue.popleft())

    def _may_push(self) -> bool:
        nbytes = self._queue[0].nbytes
        if self._credit_tensors < 1:
            return False
        if nbytes > self._credit_bytes and self._credit_bytes != self._window_bytes:
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
        self._credit_tensors -= 1
        self._credit_bytes -= parcel.nbytes
        self._pushed.append(parcel)
        parcel.transfer = self._link.new_transfer()
        inline = parcel.nbytes <= INLINE_NBYTES
        digest = parcel.digest if inline else b""
        push = Push(parcel.transfer, 0, inline, parcel.spec, digest)
        if not inline:
            self._to_grant[parcel.transfer] = parcel
        body = memoryview(b"")
        if inline and parcel.memory is not None:
            body, parcel.memory = bytes_of(parcel.memory), None
        self._send(push, body)

    def _last_copied(self) -> Parcel | None:
        for parcel in reversed(self._queue):
            if parcel.is_copied:
                return parcel
        return self._pushed[-1] if self._pushed else None


def _wake(parcel: Parcel) -> None:
    if parcel.turn is not None and not parcel.turn.done():
        parcel.turn.set_result(None)


def _settle(parcel: Parcel, was_verified: bool) -> None:
    for watcher in parcel.watchers:
        if not watcher.done():
            watcher.set_result(was_verified)
