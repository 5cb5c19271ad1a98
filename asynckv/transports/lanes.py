"""All lanes of one transport: their sockets, their threads, and the peer's leaving."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import Final

from asynckv.errors import PeerLost
from asynckv.security.tls_socket import Connection
from asynckv.shielding import clear_all_frames
from asynckv.transports.lane_sockets import LaneSocket
from asynckv.transports.parts import Part, PartTable
from asynckv.transports.pending import PendingParts
from asynckv.transports.receive_lanes import ReceiveLane
from asynckv.transports.send_lanes import SendLane

__all__ = ("Lanes",)

_PATIENCE_S: Final = 1.0
_WORTH_A_LANE_BYTES: Final = 256 * 1024


class Lanes:
    """Connected sockets that move ``pending`` parts out and those of ``table`` in.

    Threads start with the first part that needs them. ``moved(part)`` is called
    in a lane's thread; on the loop, ``let_go()`` whenever a thread may have let
    go of memory, and ``lost(cause)`` when something that is waited for will not
    come: at once by an error, within 1 s by the peer's hanging up.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        pending: PendingParts,
        table: PartTable,
        max_chunk_bytes: int,
        *,
        moved: Callable[[Part], None],
        let_go: Callable[[], None],
        lost: Callable[[BaseException | None], None],
    ) -> None:
        self.threads = 0
        self._loop = loop
        self._pending = pending
        self._table = table
        # A peer's limit of 0 must not make us send empty chunks for ever.
        self._max_chunk_bytes = max(max_chunk_bytes, 1)
        self._moved = moved
        self._let_go = let_go
        self._lost = lost
        self._sockets: list[LaneSocket] = []
        self._senders: list[SendLane] = []
        self._receivers: list[ReceiveLane] = []
        self._is_receiving = False
        self._lanes_left = 0
        self._sender_error: BaseException | None = None
        self._patience: asyncio.TimerHandle | None = None
        self._is_shut = False

    def __len__(self) -> int:
        return len(self._sockets)

    def open(self, sockets: Sequence[Connection]) -> None:
        """Take over connected sockets, one a lane; they are closed with the lanes."""
        for sock in sockets:
            lane = LaneSocket(sock)
            self._sockets.append(lane)
            self._senders.append(SendLane(lane, self, self._max_chunk_bytes))
            self._receivers.append(
                ReceiveLane(lane, self, self._table, self._max_chunk_bytes)
            )
        if self._is_shut:
            self.shut_down()

    def send(self, part: Part) -> None:
        """Queue ``part`` on a lane that has little to do. Never waits."""
        if self._lanes_left or self._sender_error is not None:
            error = PeerLost("the peer closed its lanes")
            error.__cause__ = self._sender_error
            self._loop.call_soon(self._lost, error)
            return
        self.threads += self._lane_for(part).put(part)

    def receive(self) -> None:
        """The table waits for something: let it come, if the peer is still there."""
        if not self._is_receiving:
            self._is_receiving = True
            self.threads += sum(lane.start() for lane in self._receivers)
        if self._lanes_left:
            self._judge_peer()

    def stop(self, transfer: int) -> None:
        """Let no further chunk of ``transfer`` leave."""
        for lane in self._senders:
            lane.stop(transfer)

    def is_touched(self, transfer: int) -> bool:
        """A thread reads or writes memory of ``transfer``."""
        return bool(self._table.carriers_of(transfer)) or any(
            lane.is_sending(transfer) for lane in self._senders
        )

    def shut_down(self) -> None:
        """Let every thread end. Never waits; nobody is called ``lost`` after it."""
        self._is_shut = True
        if self._patience is not None:
            self._patience.cancel()
        for sender in self._senders:
            sender.end()
        for lane in self._sockets:
            lane.shut_down()

    def _lane_for(self, part: Part) -> SendLane:
        """A few bytes go where a few others go: they are not worth another thread."""
        queued = part.left_bytes
        for lane in self._senders:
            if lane.queued_bytes + queued <= _WORTH_A_LANE_BYTES:
                return lane
        return min(self._senders, key=lambda lane: lane.queued_bytes)

    def part_moved(self, part: Part) -> None:
        self._moved(part)

    def part_left(self) -> None:
        self._call_soon(self._let_go)

    def sender_ended(self, error: BaseException | None) -> None:
        _forget_memory(error)
        self._call_soon(self._after_sender, error)

    def receiver_ended(self, error: BaseException | None) -> None:
        _forget_memory(error)
        self._call_soon(self._after_receiver, error)

    def _call_soon(self, callback: Callable[..., None], *args: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(callback, *args)

    def _after_sender(self, error: BaseException | None) -> None:
        self.threads -= 1
        if error is not None:
            # Nothing may have been missed: but that lane takes no further part.
            self._sender_error = error
            if self._pending and not self._is_shut:
                self._lost(error)
        self._let_go()

    def _after_receiver(self, error: BaseException | None) -> None:
        self.threads -= 1
        self._lanes_left += 1
        if isinstance(error, OSError | EOFError | None):
            self._judge_peer()
        elif not self._is_shut:
            self._lost(error)
        self._let_go()

    def _judge_peer(self) -> None:
        """The peer closes all its lanes or none, but not all in one moment."""
        if self._is_shut or not self._table.is_waiting:
            return
        if self._lanes_left == len(self._receivers):
            self._lost(None)
        elif self._patience is None:
            self._patience = self._loop.call_later(_PATIENCE_S, self._lose_patience)

    def _lose_patience(self) -> None:
        self._patience = None
        if self._table.is_waiting:
            self._lost(None)


def _forget_memory(error: BaseException | None) -> None:
    """Let an error that is kept not keep what was being moved."""
    if error is not None:
        clear_all_frames(error)
