"""Communicators of two ranks, and what is queued on them."""

from __future__ import annotations

import collections
import functools
import itertools
import struct
import threading
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

import numpy

from asynckv.devices.cuda import Stream
from asynckv.errors import GPUFailed
from harness.fake_gpus.memory import Allocation
from harness.fake_gpus.streams import FakeStream
from harness.fake_gpus.wires import Wire

if TYPE_CHECKING:
    from harness.fake_gpus.nccl import FakeNccl

__all__ = ("FakeComm", "NcclWork", "Operation")

_Way: TypeAlias = Literal["send", "receive"]

_HEAD: Final = struct.Struct("<cQQ")
_HELLO: Final = b"H"
_POST: Final[dict[_Way, bytes]] = {"send": b"S", "receive": b"R"}
_READY: Final = b"G"
_DATA: Final = b"D"
_SCRIBBLE: Final = 0xAB
_INVALID_ARGUMENT: Final = 4
_INVALID_USAGE: Final = 5


class Operation:
    """One send or receive. Its bytes are read and written when both sides are at it."""

    def __init__(
        self, comm: FakeComm, way: _Way, address: int, nbytes: int, stream: FakeStream
    ) -> None:
        self.comm = comm
        self.way: _Way = way
        self.stream = stream
        self._address = address
        self._nbytes = nbytes
        self._number = -1
        self._data: bytes | None = None
        self._written = 0
        self._has_begun = False
        self._memory: Allocation
        self._start = 0

    def begin(self) -> None:
        """Be the next one of its kind."""
        self._number = next(self.comm.numbers[self.way])
        self._memory, self._start = self._find()
        self._memory.users += 1
        if self.way == "receive":
            self.comm.tell(_READY, self._number, self._nbytes)

    def get_on(self) -> bool:
        """Do what can be done; whether it has ended."""
        if self._number < 0:
            self.begin()
        if self.way == "send":
            # Another size is never matched: the real one hangs too, or worse.
            if self.comm.ready.get(self._number) != self._nbytes:
                return False
            start, stop = self._start, self._start + self._nbytes
            sent = self._memory.array[start:stop].tobytes()
            self.comm.tell(_DATA, self._number, self._nbytes, sent)
            return self._end()
        data = self.comm.data.get(self._number)
        if data is None or len(data) != self._nbytes:
            return False
        stop = self._nbytes if self._has_begun else self._nbytes // 2
        self._has_begun = True
        self._write(numpy.frombuffer(data, numpy.uint8)[self._written : stop])
        return self._written >= self._nbytes and self._end()

    def scribble(self) -> None:
        """It was aborted: what it has not written is undefined."""
        if self._number < 0:
            return
        if self.way == "receive":
            rest = self._nbytes - self._written
            self._write(numpy.full(rest, _SCRIBBLE, numpy.uint8))
        self._end()

    def _end(self) -> bool:
        self._memory.users -= 1
        return True

    def _write(self, piece: numpy.typing.NDArray[numpy.uint8]) -> None:
        place = self._start + self._written
        self._memory.array[place : place + piece.nbytes] = piece
        self._written += piece.nbytes

    def _find(self) -> tuple[Allocation, int]:
        process = self.comm.nccl.process
        try:
            return process.space.find(self._address, self._nbytes)
        except GPUFailed:
            if not self.comm.nccl.says_nothing:
                process.gpus.note("memory was freed before what was queued on it began")
            raise


class NcclWork:
    """A group, as work of a stream; of all streams, its communicator's order counts."""

    def __init__(self, comm: FakeComm, operations: list[Operation]) -> None:
        self._comm = comm
        self._operations = operations
        self._left = list(operations)

    def run(self) -> bool:
        comm = self._comm
        if comm.is_aborted:
            return self._end_after_abort()
        if comm.nccl.async_error is not None or comm.line[0] is not self:
            return False
        comm.hear()
        self._left = [one for one in self._left if not one.get_on()]
        if not self._left:
            comm.line.popleft()
        return not self._left

    def _end_after_abort(self) -> bool:
        ticks = self._comm.nccl.abort_ticks
        if ticks is None or self._comm.looks_after_abort < ticks:
            self._comm.looks_after_abort += 1
            return False
        for operation in self._left:
            operation.scribble()
        return True


class FakeComm:
    """Fits :class:`~asynckv.transports.nccl.api.Comm`."""

    def __init__(self, nccl: FakeNccl, wire: Wire, device: int) -> None:
        self.nccl = nccl
        self.device = device
        self.is_aborted = False
        self.is_met = False
        self.line: collections.deque[NcclWork] = collections.deque()
        self.numbers = {"send": itertools.count(), "receive": itertools.count()}
        self.ready: dict[int, int] = {}
        self.data: dict[int, bytes] = {}
        self.looks_after_abort = 0
        self._wire = wire
        self._thread = threading.get_ident()
        self._connected: set[_Way] = set()
        self._peer_posts: list[bytes] = []
        self._greeting = b""
        self._is_over = False

    def __del__(self) -> None:
        if not self._is_over and not self.nccl.process.gpus.is_closed:
            self.nccl.process.gpus.note("a communicator was left to the collector")

    def greet(self, uuid: str, version: int) -> None:
        """Say who this rank is."""
        self._greeting = uuid.encode()
        self.tell(_HELLO, version, 0, self._greeting)

    def look_for_peer(self) -> bool:
        """Whether the other rank is there.

        :raises GPUFailed: it has the same GPU, or another NCCL
        """
        self.hear()
        return self.is_met

    def send(self, address: int, nbytes: int, peer: int, stream: Stream) -> None:
        self._queue("send", address, nbytes, stream)

    def receive(self, address: int, nbytes: int, peer: int, stream: Stream) -> None:
        self._queue("receive", address, nbytes, stream)

    def connect(self, operations: list[Operation]) -> None:
        """The first of each way waits here for the peer's first, as NCCL's does."""
        gpus = self.nccl.process.gpus
        for way in sorted({one.way for one in operations} - self._connected):
            self.tell(_POST[way], 0, 0)
            other = _POST["receive" if way == "send" else "send"]
            has_posted = functools.partial(self._has_posted, other)
            gpus.block(has_posted, "the peer's first")
            self._connected.add(way)

    def check_async_error(self) -> None:
        with self.nccl.inside(self.device, "looked for an error"):
            self._check()
            if self.nccl.async_error is not None:
                raise self.nccl.async_error

    def abort(self) -> None:
        with self.nccl.inside(self.device, "aborted"):
            self._check_thread()
            with self.nccl.process.gpus.lock:
                self.is_aborted = self._is_over = True
                self._wire.close()

    def destroy(self) -> None:
        if self._is_over:
            return
        with self.nccl.inside(self.device, "destroyed"):
            self._check()
            self.nccl.process.gpus.block(self._may_end, "a communicator to end")
            self._is_over = True
            self._wire.close()

    def tell(self, kind: bytes, number: int, nbytes: int, data: bytes = b"") -> None:
        """Let the other rank hear it."""
        if not self.nccl.says_nothing:
            self._wire.tell(_HEAD.pack(kind, number, nbytes) + data)

    def hear(self) -> None:
        """Take in what came.

        :raises GPUFailed: the other rank has the same GPU, or another NCCL
        """
        for message in self._wire.hear():
            kind, number, nbytes = _HEAD.unpack_from(message)
            if kind == _HELLO:
                self._meet(message[_HEAD.size :], number)
            elif kind == _READY:
                self.ready[number] = nbytes
            elif kind == _DATA:
                self.data[number] = message[_HEAD.size :]
            else:
                self._peer_posts.append(kind)

    def _meet(self, uuid: bytes, version: int) -> None:
        if uuid == self._greeting:
            raise GPUFailed("Duplicate GPU detected", code=_INVALID_USAGE)
        if version != self.nccl.number:
            raise GPUFailed("Mismatched NCCL version", code=_INVALID_USAGE)
        self.is_met = True

    def _has_posted(self, want: bytes) -> bool:
        self.hear()
        return want in self._peer_posts or self.is_aborted

    def _may_end(self) -> bool:
        return not self.line and not self.nccl.destroy_blocks

    def _queue(self, way: _Way, address: int, nbytes: int, stream: Stream) -> None:
        self._check()
        if not isinstance(stream, FakeStream) or stream.device != self.device:
            raise GPUFailed("a stream of another GPU", code=_INVALID_ARGUMENT)
        self.nccl.process.space.find(address, nbytes)
        self.nccl.queue(Operation(self, way, address, nbytes, stream))

    def _check(self) -> None:
        self._check_thread()
        if self._is_over:
            raise GPUFailed("the communicator has ended", code=_INVALID_ARGUMENT)

    def _check_thread(self) -> None:
        if threading.get_ident() != self._thread:
            self.nccl.process.gpus.note("a communicator was used by another thread")
            raise GPUFailed("a communicator of another thread", code=_INVALID_USAGE)
