"""The threads of a payload lane: a blocking socket, one sender, one receiver.

A thread touches a part's memory only while its lane says so, and asks between
pieces whether the part was stopped. What it has to say goes to a
:class:`LaneOwner`, from its own thread.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import os
import socket
import sys
import threading
from collections.abc import Callable
from typing import Final, Protocol

from asynckv.errors import AsyncKVError, RemoteProtocolError
from asynckv.protocol.chunks import (
    CHUNK_HEADER_BYTES,
    decode_chunk_header,
    encode_chunk_header,
)
from asynckv.transports.parts import Part, PartTable

__all__ = ("LaneOwner", "LaneSocket", "ReceiveLane", "SendLane")

_PIECE_NBYTES: Final = 2**20
"""As much is received before the digest, so that it is still in the cache."""

_NICENESS: Final = 5
_names = itertools.count(1)


class LaneOwner(Protocol):
    """Who is told what the threads do. Called in those threads."""

    def part_moved(self, part: Part) -> None:
        """The last byte of ``part`` was sent, or has landed."""

    def part_left(self) -> None:
        """A stopped part is no longer touched."""

    def sender_ended(self, error: BaseException | None) -> None:
        """A sender thread ends; with an error if not because it was told to."""

    def receiver_ended(self, error: BaseException | None) -> None:
        """A receiver thread ends: by the peer's hanging up, or by an error."""


def _step_behind_the_loop() -> None:
    """Where lanes want more cores than there are, the event loop comes first."""
    if sys.platform == "linux":  # elsewhere a thread has no priority of its own
        with contextlib.suppress(OSError):
            os.nice(_NICENESS)


class LaneSocket:
    """A connected socket that threads share; the last to leave closes it."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(True)
        self.sock = sock
        self._lock = threading.Lock()
        self._threads = 0
        self._is_shut = False

    def start(self, run: Callable[[], None], purpose: str) -> bool:
        """Start a thread that uses the socket; ``False`` if it is shut down."""
        with self._lock:
            if self._is_shut:
                return False
            self._threads += 1
        name = f"asynckv-{purpose}-{next(_names)}"
        threading.Thread(target=run, name=name, daemon=True).start()
        return True

    def leave(self) -> None:
        """A thread says that it no longer uses the socket."""
        with self._lock:
            self._threads -= 1
            self._close_if_over()

    def shut_down(self) -> None:
        """End whatever a thread waits for on the socket. Never waits."""
        with self._lock:
            if self._is_shut:
                return
            self._is_shut = True
            with contextlib.suppress(OSError):
                self.sock.shutdown(socket.SHUT_RDWR)
            self._close_if_over()

    def _close_if_over(self) -> None:
        if self._is_shut and not self._threads:
            self.sock.close()


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

    def put(self, part: Part) -> bool:
        """Queue ``part``; ``True`` if a thread had to be started for it."""
        with self._changed:
            self._queues.setdefault(part.transfer, collections.deque()).append(part)
            self.queued_bytes += part.left_bytes
            self._changed.notify()
            if self._has_thread:
                return False
            self._has_thread = True
        return self._lane.start(self._run, "send")

    def stop(self, transfer: int) -> None:
        """Send no further chunk of ``transfer``."""
        with self._changed:
            for part in self._queues.pop(transfer, ()):
                part.stopped = True
                self.queued_bytes -= part.left_bytes

    def is_sending(self, transfer: int) -> bool:
        """The thread reads memory of ``transfer``."""
        with self._changed:
            return self._sending is not None and self._sending.transfer == transfer

    def end(self) -> None:
        """Let the thread end after its chunk; the socket is not this lane's."""
        with self._changed:
            self._ended = True
            self._changed.notify()

    def _run(self) -> None:
        error: BaseException | None = None
        try:
            _step_behind_the_loop()
            while (part := self._next_part()) is not None:
                sent = 0
                try:
                    sent = self._send_chunk_of(part)
                finally:
                    self._leave(part, sent)
        except Exception as exc:  # noqa: BLE001 - the owner is told
            error = _without_memory(exc)
        finally:
            self._lane.leave()
            self._owner.sender_ended(error)

    def _next_part(self) -> Part | None:
        with self._changed:
            while not self._queues and not self._ended:
                self._changed.wait()
            if self._ended:
                return None
            transfer, parts = next(iter(self._queues.items()))
            self._queues.move_to_end(transfer)
            self._sending = parts[0]
            return self._sending

    def _send_chunk_of(self, part: Part) -> int:
        start = part.moved_bytes
        nbytes = min(part.left_bytes, self._max_chunk_bytes)
        piece = part.memory[start : start + nbytes]
        part.add_to_digest(piece)
        header = encode_chunk_header(part.transfer, part.number, start, nbytes)
        _send_all(self._lane.sock, header, piece)
        return nbytes

    def _leave(self, part: Part, nbytes: int) -> None:
        with self._changed:
            self._sending = None
            part.moved_bytes += nbytes
            stopped, moved = part.stopped, not part.left_bytes
            if not stopped:
                self.queued_bytes -= nbytes
                if moved:
                    self._drop_first_of(part.transfer)
        if stopped:
            part.let_go()
            self._owner.part_left()
        elif moved:
            self._owner.part_moved(part)

    def _drop_first_of(self, transfer: int) -> None:
        parts = self._queues[transfer]
        parts.popleft()
        if not parts:
            del self._queues[transfer]


class ReceiveLane:
    """Receives chunks straight into the memory that waits for them."""

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
        return self._lane.start(self._run, "receive")

    def _run(self) -> None:
        error: BaseException | None = None
        try:
            _step_behind_the_loop()
            while self._receive_chunk():
                pass
        except Exception as exc:  # noqa: BLE001 - the owner is told
            error = _without_memory(exc)
        finally:
            self._lane.leave()
            self._owner.receiver_ended(error)

    def _receive_chunk(self) -> bool:
        header = memoryview(self._header)
        if not _receive_all(self._lane.sock, header, may_end=True):
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
            piece = part.memory[start : min(start + _PIECE_NBYTES, end)]
            _receive_all(self._lane.sock, piece)
            part.add_to_digest(piece)
            part.moved_bytes += piece.nbytes

    def _leave(self, part: Part) -> None:
        if self._table.leave(part, self):
            self._owner.part_moved(part)
        elif part.stopped:
            part.let_go()
            self._owner.part_left()

    def _drop(self, nbytes: int) -> None:
        if nbytes and not self._scratch:
            self._scratch = memoryview(bytearray(_PIECE_NBYTES))
        while nbytes:
            piece = self._scratch[: min(nbytes, _PIECE_NBYTES)]
            _receive_all(self._lane.sock, piece)
            nbytes -= piece.nbytes


def _without_memory(error: Exception) -> Exception:
    """Drop the traceback of what the world does: its frames hold the payload."""
    if isinstance(error, OSError | EOFError | AsyncKVError):
        return error.with_traceback(None)
    return error


def _send_all(sock: socket.socket, header: bytes, piece: memoryview) -> None:
    sent = sock.sendmsg([header, piece])
    while sent < len(header):
        sent += sock.sendmsg([header[sent:], piece])
    sent -= len(header)
    while sent < piece.nbytes:
        sent += sock.send(piece[sent:])


def _receive_all(
    sock: socket.socket, into: memoryview, *, may_end: bool = False
) -> bool:
    """Fill ``into``; ``False`` if the peer hung up before it, and that may be."""
    got = 0
    while got < into.nbytes:
        count = sock.recv_into(into[got:], 0, socket.MSG_WAITALL)
        if count == 0:
            if may_end and got == 0:
                return False
            raise EOFError("the peer hung up within a chunk")
        got += count
    return True
