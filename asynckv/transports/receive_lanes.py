"""The receiving half of a payload lane: chunks land in the memory that waits for them.

The thread writes to a part's memory only while the table of parts says so, and
asks between pieces whether the part was stopped.
"""

from __future__ import annotations

from typing import Final

from asynckv.errors import RemoteProtocolError
from asynckv.protocol.chunks import CHUNK_HEADER_BYTES, decode_chunk_header
from asynckv.transports.lane_sockets import LaneOwner, LaneSocket
from asynckv.transports.parts import Part, PartTable

__all__ = ("ReceiveLane",)

_PIECE_NBYTES: Final = 2**20
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
                nbytes = _PIECE_NBYTES if part.is_digested else _PLAIN_NBYTES
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
            part.let_go()
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
