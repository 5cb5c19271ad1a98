"""Payload over sockets: one connection a lane, blocking, moved by threads.

Bytes go from the sender's memory to the receiver's and through nothing else in
this process. Threads start with the first part that needs them.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Sequence
from typing import ClassVar, Final

from asynckv.abc import PayloadTransport
from asynckv.errors import AsyncKVError, LocalProtocolError, PeerLost
from asynckv.shielding import wait_shielded
from asynckv.transports.completions import Completions
from asynckv.transports.lanes import LaneSocket, ReceiveLane, SendLane
from asynckv.transports.parts import DoneCallback, Part, PartTable

__all__ = ("DEFAULT_CHUNK_BYTES", "InlineTransport")

DEFAULT_CHUNK_BYTES: Final = 4 * 2**20

_QUIET_S: Final = 1.0
"""A lane that does not let go of memory for as long is shut down."""
_CLOSE_S: Final = 1.0


class InlineTransport(PayloadTransport):
    """Payload lanes over connected stream sockets, TCP or unix.

    ``on_lost(error)`` is called on the loop, at most once, if the transport
    ends in any way but by :meth:`aclose` or :meth:`abort`: with ``PeerLost``
    or ``RemoteProtocolError``. After any end each part that has not moved is
    told so (``done(b"", error)``) as soon as no thread touches any memory.

    ``part_moved`` to ``receiver_ended`` are what the lanes' threads call.

    A transfer's parts leave in the order in which they were queued on their
    lane; transfers take turns, chunk by chunk.
    """

    name: ClassVar[str] = "inline"

    def __init__(
        self,
        lanes: int,
        digest: bool,
        loop: asyncio.AbstractEventLoop,
        on_lost: Callable[[Exception], None],
        max_chunk_bytes: int = DEFAULT_CHUNK_BYTES,
    ) -> None:
        self._lane_count = lanes
        self._digest = digest
        self._loop = loop
        self._on_lost = on_lost
        # A peer's limit of 0 must not make us send empty chunks for ever.
        self._max_chunk_bytes = max(max_chunk_bytes, 1)
        self._sockets: list[LaneSocket] = []
        self._senders: list[SendLane] = []
        self._receivers: list[ReceiveLane] = []
        self._receiving = False
        self._table = PartTable()
        self._pending: dict[int, set[Part]] = {}
        self._error: Exception | None = None
        self._threads = 0
        self._lanes_left = 0
        self._patience: asyncio.TimerHandle | None = None
        self._over: asyncio.Future[None] = loop.create_future()
        self._drained: asyncio.Future[None] | None = None
        self._quiet: list[tuple[int, asyncio.Future[None]]] = []
        self._completions = Completions(loop, self._deliver)

    def describe(self) -> bytes:
        return b""

    async def open(self, peer_description: bytes, side_channel: object) -> None:
        """Take over the connected sockets in ``side_channel``, one a lane.

        :raises LocalProtocolError: there are not as many as lanes
        """
        if not isinstance(side_channel, Sequence):
            raise LocalProtocolError("an inline transport opens on sockets")
        if len(side_channel) != self._lane_count:
            raise LocalProtocolError(
                f"{len(side_channel)} sockets for {self._lane_count} lanes"
            )
        self._open(list(side_channel))

    def _open(self, sockets: list[socket.socket]) -> None:
        for sock in sockets:
            lane = LaneSocket(sock)
            self._sockets.append(lane)
            self._senders.append(SendLane(lane, self, self._max_chunk_bytes))
            self._receivers.append(
                ReceiveLane(lane, self, self._table, self._max_chunk_bytes)
            )
        if self._error is not None:
            self._shut_down()

    def send(
        self,
        transfer: int,
        part: int,
        source: memoryview,
        done: DoneCallback,
        *,
        digest: bytes | None = None,
    ) -> None:
        outgoing = self._part(transfer, part, source, done, digest)
        self._pending.setdefault(transfer, set()).add(outgoing)
        if self._error is not None:
            self._loop.call_soon(self._fail_if_over)
        elif not outgoing.left_bytes:
            self.part_moved(outgoing)
        elif self._lanes_left:
            self._loop.call_soon(self._lose, PeerLost("the peer closed its lanes"))
        else:
            lane = min(self._senders, key=lambda lane: lane.queued_bytes)
            self._threads += lane.put(outgoing)

    def receive(
        self, transfer: int, part: int, target: memoryview, done: DoneCallback
    ) -> None:
        """As the contract says.

        :raises LocalProtocolError: the part is waited for already, or the
            transport is not open yet
        """
        incoming = self._part(transfer, part, target, done, None)
        if not incoming.left_bytes and self._error is None:
            self._table.announce(transfer)
            self._pending.setdefault(transfer, set()).add(incoming)
            self.part_moved(incoming)
            return
        self._table.add(incoming)
        if self._error is not None:
            self._loop.call_soon(self._fail_if_over)
            return
        self._start_receiving()
        if self._lanes_left:
            self._judge_peer()

    def announce(self, transfer: int) -> None:
        self._table.announce(transfer)

    def landed_bytes(self, transfer: int) -> int:
        return self._table.landed_bytes(transfer)

    def stop(self, transfer: int) -> None:
        self._table.stop(transfer)
        for lane in self._senders:
            lane.stop(transfer)
        for part in self._pending.pop(transfer, ()):
            part.stopped = True
        self._settle_drained()

    async def quiesce(self, transfer: int) -> None:
        self.stop(transfer)
        if not self._is_touched(transfer):
            return
        future: asyncio.Future[None] = self._loop.create_future()
        self._quiet.append((transfer, future))
        timer = self._loop.call_later(_QUIET_S, self._give_up_on, transfer)
        try:
            await wait_shielded(future)
        finally:
            timer.cancel()

    async def aclose(self) -> None:
        """As the contract says: at most 1 s for queued parts, 1 s for threads."""
        try:
            if self._pending and self._error is None:
                if self._drained is None:
                    self._drained = self._loop.create_future()
                await wait_shielded(self._drained, timeout_s=_CLOSE_S)
        finally:
            self.abort()
            await wait_shielded(self._over, timeout_s=_CLOSE_S)

    def abort(self) -> None:
        """End now. Never waits; threads let go within a moment."""
        self._end(PeerLost("the payload lanes were closed on this side"))

    def part_moved(self, part: Part) -> None:
        self._completions.add(part)

    def part_left(self) -> None:
        self._call_soon(self._settle_quiet)

    def sender_ended(self, error: BaseException | None) -> None:
        self._call_soon(self._after_sender, error)

    def receiver_ended(self, error: BaseException | None) -> None:
        self._call_soon(self._after_receiver, error)

    def _call_soon(self, callback: Callable[..., None], *args: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(callback, *args)

    def _part(
        self,
        transfer: int,
        number: int,
        memory: memoryview,
        done: DoneCallback,
        digest: bytes | None,
    ) -> Part:
        if not self._sockets:
            raise LocalProtocolError("the payload lanes are not open yet")
        return Part(transfer, number, memory, done, digest if self._digest else b"")

    def _start_receiving(self) -> None:
        if not self._receiving:
            self._receiving = True
            self._threads += sum(lane.start() for lane in self._receivers)

    def _after_sender(self, error: BaseException | None) -> None:
        self._threads -= 1
        if error is not None and self._pending:
            self._lose(error)
        self._settle_quiet()
        self._fail_if_over()

    def _after_receiver(self, error: BaseException | None) -> None:
        self._threads -= 1
        self._lanes_left += 1
        if isinstance(error, OSError | EOFError | None):
            self._judge_peer()
        else:
            self._lose(error)
        self._settle_quiet()
        self._fail_if_over()

    def _judge_peer(self) -> None:
        """The peer closes all its lanes or none, but not all in one moment."""
        if self._error is not None or not self._table.is_waiting:
            return
        if self._lanes_left == len(self._receivers):
            self._lose(None)
        elif self._patience is None:
            self._patience = self._loop.call_later(_CLOSE_S, self._lose_patience)

    def _lose_patience(self) -> None:
        self._patience = None
        if self._table.is_waiting:
            self._lose(None)

    def _is_touched(self, transfer: int) -> bool:
        return bool(self._table.carriers_of(transfer)) or any(
            lane.is_sending(transfer) for lane in self._senders
        )

    def _settle_quiet(self) -> None:
        waiting = []
        for transfer, future in self._quiet:
            if self._is_touched(transfer):
                waiting.append((transfer, future))
            elif not future.done():
                future.set_result(None)
        self._quiet = waiting

    def _give_up_on(self, transfer: int) -> None:
        if self._is_touched(transfer):
            self._lose(PeerLost("a payload lane did not let go of memory in time"))

    def _deliver(self, part: Part) -> None:
        parts = self._pending.get(part.transfer)
        if parts is not None:
            parts.discard(part)
            if not parts:
                del self._pending[part.transfer]
        part.tell()
        self._settle_drained()

    def _settle_drained(self) -> None:
        drained = self._drained
        if drained is not None and not drained.done() and not self._pending:
            drained.set_result(None)

    def _lose(self, cause: BaseException | None) -> None:
        if self._error is not None:
            return
        if isinstance(cause, AsyncKVError):
            error: Exception = cause
        else:
            error = PeerLost("a payload lane ended before what it had to carry")
            error.__cause__ = cause
        self._end(error)
        self._on_lost(error)

    def _end(self, error: Exception) -> None:
        if self._error is not None:
            return
        self._error = error
        if self._patience is not None:
            self._patience.cancel()
        self._shut_down()
        self._call_soon(self._fail_if_over)

    def _shut_down(self) -> None:
        for sender in self._senders:
            sender.end()
        for lane in self._sockets:
            lane.shut_down()

    def _fail_if_over(self) -> None:
        """Once no thread is left: tell what has moved, then what never will."""
        if self._error is None or self._threads:
            return
        self._completions.deliver_all()
        left = [part for parts in self._pending.values() for part in parts]
        self._pending.clear()
        for part in [*left, *self._table.take_all()]:
            part.tell(self._error)
        self._settle_drained()
        if not self._over.done():
            self._over.set_result(None)
