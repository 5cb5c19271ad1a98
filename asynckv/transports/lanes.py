"""All lanes of one transport: their sockets, their threads, and the peer's leaving.

Parts leave in chunks, transfers take turns, and chunks land in the memory that waits
for them. A sending thread reads a part's memory only between
:meth:`SendLane._next_part` and :meth:`SendLane._leave`; a receiving one writes to it
only while the table of parts says so. Both ask between pieces whether the part was
stopped. Of one transfer the first part leaves that has bytes to be sent.
"""

from __future__ import annotations

import asyncio
import collections
import threading
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Final

from asynckv.errors import PeerLost, RemoteProtocolError
from asynckv.protocol.wire import (
    CHUNK_HEADER_BYTES,
    decode_chunk_header,
    encode_chunk_header,
)
from asynckv.security.tls_socket import Connection
from asynckv.tensors.runs import SmallBlocks
from asynckv.transports.lane_sockets import LaneOwner, LaneSocket
from asynckv.transports.parts import Part, PartTable, PendingParts, call_on
from asynckv.waits.waiting import clear_all_frames

__all__ = (
    "Lanes",
    "ReceiveLane",
    "SendLane",
)


_DIGESTED_NBYTES: Final = 2**20
"""As much is received before the digest, so that it is still in the cache."""

_PLAIN_NBYTES: Final = 2 * 2**20
"""Without a digest; then it is asked whether the part was stopped."""

_ROOM_NBYTES: Final = 512 * 1024
"""Of small blocks, and of what is not wanted, as much comes at a time."""


class ReceiveLane:
    """Receives chunks straight into the memory that waits for them.

    Only small blocks go through 512 KiB of the lane's own, where they are digested.
    """

    def __init__(
        self, lane: LaneSocket, owner: LaneOwner, table: PartTable, max_chunk_bytes: int
    ) -> None:
        self._lane = lane
        self._owner = owner
        self._table = table
        self._max_chunk_bytes = max_chunk_bytes
        self._header = bytearray(CHUNK_HEADER_BYTES)
        self._scratch = memoryview(b"")

    def start(self) -> bool:
        """Start the thread; ``False`` if the lane is shut down."""
        owner = self._owner
        return self._lane.start(self._receive_chunks, "receive", owner.receiver_ended)

    def _receive_chunks(self) -> None:
        while self._receive_chunk():
            pass

    def _receive_chunk(self) -> bool:
        header = memoryview(self._header)
        if not self._lane.receive([header], may_end=True):
            return False
        chunk = decode_chunk_header(header)
        if chunk.nbytes > self._max_chunk_bytes:
            raise RemoteProtocolError(
                f"a chunk of {chunk.nbytes} bytes; {self._max_chunk_bytes} are allowed"
            )
        part = self._table.enter(chunk, self)
        if part is None:
            self._drop(chunk.nbytes)
            return True
        end = part.moved_bytes + chunk.nbytes
        try:
            self._receive_into(part, end)
        finally:
            self._leave(part)
        self._drop(end - part.moved_bytes)
        return True

    def _receive_into(self, part: Part, end: int) -> None:
        while part.moved_bytes < end and not part.stopped:
            start = part.moved_bytes
            blocks = part.small_blocks
            if blocks is not None:
                stop = min(start + _ROOM_NBYTES, end)
                pieces = [self._room(stop - start)]
            else:
                nbytes = _DIGESTED_NBYTES if part.is_digested else _PLAIN_NBYTES
                stop = min(start + nbytes, end)
                pieces = part.pieces(start, stop)
            self._lane.receive(pieces)
            part.add_to_digest(pieces)
            if blocks is not None:
                blocks.put(start, pieces[0])
            part.moved_bytes = stop

    def _leave(self, part: Part) -> None:
        if self._table.leave(part, self):
            self._owner.part_moved(part)
        elif part.stopped:
            part.release()
            self._owner.part_left()

    def _drop(self, nbytes: int) -> None:
        while nbytes:
            piece = self._room(min(nbytes, _ROOM_NBYTES))
            self._lane.receive([piece])
            nbytes -= piece.nbytes

    def _room(self, nbytes: int) -> memoryview:
        if not self._scratch:
            self._scratch = memoryview(bytearray(_ROOM_NBYTES))
        return self._scratch[:nbytes]


_STAGED_NBYTES: Final = 512 * 1024
"""Of small blocks so much is copied, digested and sent while it is in the cache."""


class SendLane:
    """Sends parts in chunks; transfers take turns, parts of one keep their order."""

    def __init__(
        self, lane: LaneSocket, owner: LaneOwner, max_chunk_bytes: int
    ) -> None:
        self._lane = lane
        self._owner = owner
        self._max_chunk_bytes = max_chunk_bytes
        self._changed = threading.Condition()
        self._queues: collections.OrderedDict[int, collections.deque[Part]] = (
            collections.OrderedDict()
        )
        self._sending: Part | None = None
        self._has_thread = False
        self._ended = False
        self.queued_bytes = 0
        self._room = memoryview(b"")

    def put(self, part: Part) -> bool:
        """Queue ``part``; ``True`` if a thread had to be started for it."""
        with self._changed:
            self._queues.setdefault(part.transfer, collections.deque()).append(part)
            part.call_when_ready(self._wake)
            self.queued_bytes += part.nbytes
            self._changed.notify()
            if self._has_thread:
                return False
            self._has_thread = True
        return self._lane.start(self._send_parts, "send", self._owner.sender_ended)

    def stop(self, transfer: int) -> None:
        """Send no further chunk of ``transfer``, and keep no memory but of this one."""
        with self._changed:
            parts, sending = self._queues.pop(transfer, ()), self._sending
            for part in parts:
                part.stopped = True
                self.queued_bytes -= part.left_bytes
        for part in parts:
            if part is not sending:  # the thread lets go of that one
                part.release()

    def is_sending(self, transfer: int) -> bool:
        """The thread reads memory of ``transfer``."""
        with self._changed:
            return self._sending is not None and self._sending.transfer == transfer

    def end(self) -> None:
        """Let the thread end after its chunk; the socket is not this lane's."""
        with self._changed:
            self._ended = True
            self._changed.notify()

    def _send_parts(self) -> None:
        while self._send_chunk():
            pass

    def _send_chunk(self) -> bool:
        # A call for each, so that a thread that waits has no part in its frame.
        part, sent = self._next_part(), 0
        if part is None:
            return False
        try:
            sent = self._send_chunk_of(part)
        finally:
            self._leave(part, sent)
        return True

    def _next_part(self) -> Part | None:
        with self._changed:
            while (part := self._first_ready()) is None and not self._ended:
                self._changed.wait()
            if self._ended or part is None:
                return None
            self._queues.move_to_end(part.transfer)
            self._sending = part
            return part

    def _first_ready(self) -> Part | None:
        for parts in self._queues.values():
            for part in parts:
                if part.ready_bytes:
                    return part
        return None

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify()

    def _send_chunk_of(self, part: Part) -> int:
        start = part.moved_bytes
        nbytes = min(part.ready_bytes, self._max_chunk_bytes)
        header = encode_chunk_header(part.transfer, part.number, start, nbytes)
        blocks = part.small_blocks
        if blocks is not None:
            self._send_blocks(part, blocks, header, nbytes)
            return nbytes
        pieces = part.pieces(start, start + nbytes)
        part.add_to_digest(pieces)
        self._lane.send(header, pieces)
        return nbytes

    def _send_blocks(
        self, part: Part, blocks: SmallBlocks, header: bytes, nbytes: int
    ) -> None:
        if not self._room:
            self._room = memoryview(bytearray(_STAGED_NBYTES))
        start = part.moved_bytes
        for done in range(0, nbytes, _STAGED_NBYTES):
            piece = self._room[: min(_STAGED_NBYTES, nbytes - done)]
            blocks.take(start + done, piece)
            part.add_to_digest([piece])
            self._lane.send(header, [piece])
            header = b""

    def _leave(self, part: Part, nbytes: int) -> None:
        with self._changed:
            self._sending = None
            part.move(nbytes)
            stopped, moved = part.stopped, not part.left_bytes
            if not stopped:
                self.queued_bytes -= nbytes
                if moved:
                    self._drop(part)
        if stopped:
            part.release()
            self._owner.part_left()
        elif moved:
            self._owner.part_moved(part)

    def _drop(self, part: Part) -> None:
        parts = self._queues[part.transfer]
        parts.remove(part)
        if not parts:
            del self._queues[part.transfer]


_PATIENCE_S: Final = 1.0
_WORTH_A_LANE_BYTES: Final = 256 * 1024


class Lanes:
    """Connected sockets that move ``pending`` parts out and those of ``table`` in.

    Threads start with the first part that needs them. ``moved(part)`` is called
    in a lane's thread; on the loop, ``release()`` whenever a thread may have let
    go of memory, and ``lost(cause)`` when something that is waited for will not
    come: at once by an error, within 1 s by the peer's hanging up.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        pending: PendingParts[Part],
        table: PartTable,
        max_chunk_bytes: int,
        *,
        moved: Callable[[Part], None],
        release: Callable[[], None],
        lost: Callable[[BaseException | None], None],
    ) -> None:
        self.threads = 0
        self.is_open = False
        """Can something be moved, or could it before they were shut down?"""
        self._loop = loop
        self._pending = pending
        self._table = table
        # A peer's limit of 0 must not make us send empty chunks for ever.
        self._max_chunk_bytes = max(max_chunk_bytes, 1)
        self._moved = moved
        self._release = release
        self._lost = lost
        self._sockets: list[LaneSocket] = []
        self._senders: list[SendLane] = []
        self._receivers: list[ReceiveLane] = []
        self._is_receiving = False
        self._lanes_left = 0
        self._sender_error: BaseException | None = None
        self._patience: asyncio.TimerHandle | None = None
        self._is_shut = False

    def open(self, sockets: Sequence[Connection]) -> None:
        """Take over connected sockets, one a lane; they are closed with the lanes."""
        self.is_open = bool(sockets)
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
        self.threads += self._lane_for(part.nbytes).put(part)

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

    def _lane_for(self, nbytes: int) -> SendLane:
        """A few bytes go where a few others go: they are not worth another thread."""
        for lane in self._senders:
            if lane.queued_bytes + nbytes <= _WORTH_A_LANE_BYTES:
                return lane
        return min(self._senders, key=attrgetter("queued_bytes"))

    def part_moved(self, part: Part) -> None:
        self._moved(part)

    def part_left(self) -> None:
        call_on(self._loop, self._release)

    def sender_ended(self, error: BaseException | None) -> None:
        _forget_memory(error)
        call_on(self._loop, self._after_sender, error)

    def receiver_ended(self, error: BaseException | None) -> None:
        _forget_memory(error)
        call_on(self._loop, self._after_receiver, error)

    def _after_sender(self, error: BaseException | None) -> None:
        self.threads -= 1
        if error is not None:
            # Nothing may have been missed: but that lane takes no further part.
            self._sender_error = error
            if self._pending and not self._is_shut:
                self._lost(error)
        self._release()

    def _after_receiver(self, error: BaseException | None) -> None:
        self.threads -= 1
        self._lanes_left += 1
        if isinstance(error, OSError | EOFError | None):
            self._judge_peer()
        elif not self._is_shut:
            self._lost(error)
        self._release()

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
