"""The sending half of a payload lane: parts leave in chunks, transfers take turns.

Of one transfer the first part leaves that has bytes to be sent.

The thread reads a part's memory only between :meth:`SendLane._next_part` and
:meth:`SendLane._leave`, and asks between chunks whether the part was stopped.
"""

from __future__ import annotations

import collections
import threading
from typing import Final

from asynckv.protocol.chunks import encode_chunk_header
from asynckv.tensors.small_blocks import SmallBlocks
from asynckv.transports.lane_sockets import LaneOwner, LaneSocket
from asynckv.transports.parts import Part

__all__ = ("SendLane",)

_PIECE_NBYTES: Final = 512 * 1024
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
            self.queued_bytes += part.left_bytes
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
                part.let_go()

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
            self._room = memoryview(bytearray(_PIECE_NBYTES))
        start = part.moved_bytes
        for done in range(0, nbytes, _PIECE_NBYTES):
            piece = self._room[: min(_PIECE_NBYTES, nbytes - done)]
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
            part.let_go()
            self._owner.part_left()
        elif moved:
            self._owner.part_moved(part)

    def _drop(self, part: Part) -> None:
        parts = self._queues[part.transfer]
        parts.remove(part)
        if not parts:
            del self._queues[part.transfer]
