"""What a thread needs to move bytes of one GPU: a stream, pinned memory, events.

A lane reads and writes memory of its GPU by way of two pinned slots: while one is read
or filled, the other is on its way. Rows of a table (blocks of a paged cache) are
gathered and scattered on the GPU by torch's own indexing. Rule of this file: nothing
runs on an event loop, and nothing waits for a GPU without a limit.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple, TypeAlias

import numpy
import numpy.typing
import torch

from asynckv.devices.access import gpu_access
from asynckv.devices.cuda import CudaApi, DeviceMemory, Event, PinnedMemory
from asynckv.devices.names import cuda_of_this_process
from asynckv.devices.tensors import DeviceTensors, Gpus, TorchTensors
from asynckv.errors import GPUFailed
from asynckv.tensors.runs import Memory, take_at
from asynckv.types import TensorSpec

__all__ = (
    "LIMIT_S",
    "SLOT_NBYTES",
    "STUCK",
    "TABLE_ROWS",
    "DeviceLane",
    "DeviceLanes",
    "DevicePlace",
    "DeviceRows",
    "keep_for_ever",
)

SLOT_NBYTES: Final = 4 * 2**20
"""Of each of the two pinned buffers of a lane."""

LIMIT_S: Final = 30.0
"""Longer than that no copy of a slot takes: the GPU, or its driver, is stuck."""

STUCK: Final = "the GPU or its driver is stuck: nvidia-smi"
TABLE_ROWS: Final = 64 * 1024
_LONG_RUN_NBYTES: Final = 2**20
"""Runs of rows that are as long, on average, are copied as they are."""

_WITHIN_NBYTES: Final = 64 * 2**20
"""A thread asks whether to go on after as much: some ten microseconds of a GPU."""

_ALIGNMENT: Final = 16
_SHORTEST_S: Final = 20e-6
_LONGEST_S: Final = 1e-3

_Ids: TypeAlias = numpy.typing.NDArray[numpy.int64]

_kept: list[object] = []
"""What a GPU may still read or write although nobody waits for it any more."""


def keep_for_ever(memory: object) -> None:
    """Never free what a GPU may still be at."""
    _kept.append(memory)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class DeviceRows:
    """Rows ``ids`` of ``table``, in that order, as if they were one memory.

    ``table`` is a tensor of a GPU with two dimensions, whose rows are contiguous but
    may lie apart; ``memory`` is where it lies, from its first byte to its last.
    """

    table: torch.Tensor
    ids: _Ids
    memory: DeviceMemory

    @property
    def device(self) -> int:
        """The number of the GPU."""
        return self.memory.device

    @property
    def row_nbytes(self) -> int:
        """Bytes of a row."""
        return self.table.shape[1] * self.table.element_size()

    @property
    def nbytes(self) -> int:
        """Bytes of all rows."""
        return len(self.ids) * self.row_nbytes

    def runs(self, start: int, stop: int) -> list[DeviceMemory] | None:
        """Return where the bytes from ``start`` to ``stop`` lie, if in few places.

        ``None``: in many, all of them whole rows; to be gathered, or scattered.
        """
        nbytes, step = self.row_nbytes, self.table.stride(0) * self.table.element_size()
        first, last = start // nbytes, -(-stop // nbytes)
        ids = self.ids[first:last]
        begins = numpy.arange(len(ids))
        if step == nbytes:
            begins = numpy.flatnonzero(numpy.diff(ids, prepend=-2) != 1)
        is_long = len(begins) * _LONG_RUN_NBYTES <= stop - start
        if len(begins) > 1 and not is_long:
            return None
        found, done = [], first * nbytes
        for begin, end in zip(begins, [*begins[1:], len(ids)], strict=True):
            # Of a row that is longer than a slot these are only some bytes.
            length = int(end - begin) * nbytes
            low, high = max(start - done, 0), min(stop - done, length)
            place = int(ids[begin]) * step
            found.append(self.memory.part(place + low, place + high))
            done += length
        return found


DevicePlace: TypeAlias = DeviceMemory | DeviceRows
"""Where bytes lie on a GPU."""


class _Piece(NamedTuple):
    """Bytes from ``start`` to ``stop`` of a place, which are at ``at`` in a slot.

    The ids of their rows are from ``ids_at`` on in its table.
    """

    which: int
    start: int
    stop: int
    at: int = 0
    ids_at: int = 0

    @property
    def nbytes(self) -> int:
        """How many there are."""
        return self.stop - self.start


class _Slot:
    """Pinned memory for bytes and for ids, and the event behind what uses it."""

    def __init__(self, cuda: CudaApi, nbytes: int, rows: int) -> None:
        self.event: Event = cuda.event()
        self._cuda = cuda
        self._sizes = nbytes, 8 * rows
        self._made: dict[int, PinnedMemory] = {}

    @property
    def memory(self) -> PinnedMemory:
        """That of the bytes."""
        return self._pinned(0)

    @property
    def ids(self) -> PinnedMemory:
        """That of the ids."""
        return self._pinned(1)

    def view(self, piece: _Piece) -> memoryview:
        """Return the bytes of a piece."""
        return self.memory.view[piece.at : piece.at + piece.nbytes]

    def close(self) -> None:
        """Give it back: nothing is at it any more."""
        self.event.close()
        while self._made:
            _, pinned = self._made.popitem()
            pinned.view.release()
            self._cuda.host_free(pinned)

    def _pinned(self, which: int) -> PinnedMemory:
        if which not in self._made:
            self._made[which] = self._cuda.host_alloc(self._sizes[which])
        return self._made[which]


class DeviceLane:
    """One thread's stream on a GPU, and two slots of pinned memory.

    What does not end within ``limit_s`` is given up: then the lane ``is_stuck``.
    """

    def __init__(
        self,
        cuda: CudaApi,
        tensors: DeviceTensors,
        device: int,
        *,
        slot_nbytes: int = SLOT_NBYTES,
        table_rows: int = TABLE_ROWS,
        limit_s: float = LIMIT_S,
    ) -> None:
        self.is_stuck = False
        self._cuda, self._tensors, self._device = cuda, tensors, device
        self._slot_nbytes, self._table_rows = slot_nbytes, table_rows
        self._limit_s = limit_s
        self._stream = cuda.stream()
        self._slots = [_Slot(cuda, slot_nbytes, table_rows) for _ in range(2)]
        self._scratch: DeviceMemory | None = None
        """Of the GPU: rows that were gathered, then the ids of rows."""

    def until_ready(self, event: Event | None) -> Iterator[None]:
        """Wait for a mark in somebody's stream, as long as that takes; yield meanwhile.

        :raises GPUFailed: the work before it failed
        """
        pause_s = _SHORTEST_S
        while event is not None and not event.query():
            time.sleep(pause_s)  # noqa: TID251 - a thread's
            pause_s = min(2 * pause_s, _LONGEST_S)
            yield

    def read(self, places: Sequence[DevicePlace]) -> Iterator[tuple[int, memoryview]]:
        """Yield all bytes of each place in order: which place it is, and some of them.

        They are there until the next are asked for, which are on their way meanwhile.

        :raises GPUFailed: CUDA failed, or has not ended in time
        """
        before: tuple[_Slot, list[_Piece]] | None = None
        for pieces in self._slots_of(places):
            slot = self._take_slot()
            for piece in pieces:
                there = slot.memory.address + piece.at
                self._queue(places[piece.which], piece, slot, there, is_read=True)
            slot.event.record(self._stream)
            if before is not None:
                yield from self._arrived(*before)
            before = slot, pieces
        if before is not None:
            yield from self._arrived(*before)

    def write(
        self, places: Sequence[DevicePlace], sources: Sequence[Memory]
    ) -> Iterator[tuple[int, memoryview]]:
        """Copy each source to its place, and yield its bytes in order, as :meth:`read`.

        Exhausted: all of them are there.

        :raises GPUFailed: CUDA failed, or has not ended in time
        """
        for pieces in self._slots_of(places):
            slot = self._take_slot()
            for piece in pieces:
                filled = slot.view(piece)
                take_at(sources[piece.which], piece.start, filled)
                yield piece.which, filled
                there = slot.memory.address + piece.at
                self._queue(places[piece.which], piece, slot, there, is_read=False)
            slot.event.record(self._stream)
        self.drain()

    def within(self, source: DevicePlace, target: DevicePlace) -> Iterator[None]:
        """Copy as many bytes from place to place; yield now and then.

        Exhausted: all of them are there. Plain memory may be another GPU's; rows of
        both sides are of one length.

        :raises GPUFailed: CUDA failed, or has not ended in time
        """
        are_rows = [isinstance(place, DeviceRows) for place in (source, target)]
        room, done = self._slot_nbytes if all(are_rows) else _WITHIN_NBYTES, 0
        while done < source.nbytes:
            stop = min(self._reach(place, done, room) for place in (source, target))
            self._queue_within(source, target, _Piece(0, done, stop))
            self.drain()
            yield
            done = stop

    def drain(self) -> None:
        """Wait until nothing of this lane is under way.

        :raises GPUFailed: CUDA failed, or has not ended in time
        """
        self._slots[0].event.record(self._stream)
        self._wait(self._slots[0].event)

    def close(self) -> None:
        """Give all of it back. Nothing is queued any more."""
        with contextlib.suppress(GPUFailed):  # else its context is gone, with all of it
            self._cuda.use_device(self._device)
            self._stream.close()
            for slot in self._slots:
                slot.close()
            if self._scratch is not None:
                with gpu_access(self._cuda, self._device).allocating():
                    self._cuda.free(self._scratch)

    def _take_slot(self) -> _Slot:
        """Return the slot that was not taken last, when nothing is at it any more."""
        slot = self._slots.pop(0)
        self._slots.append(slot)
        self._wait(slot.event)
        return slot

    def _arrived(
        self, slot: _Slot, pieces: Sequence[_Piece]
    ) -> Iterator[tuple[int, memoryview]]:
        self._wait(slot.event)
        for piece in pieces:
            yield piece.which, slot.view(piece)

    def _wait(self, event: Event) -> None:
        end_s, pause_s = time.monotonic() + self._limit_s, _SHORTEST_S
        while not event.query():
            if time.monotonic() > end_s:
                self.is_stuck = True
                raise GPUFailed(
                    f"a copy of the GPU has not ended within {self._limit_s:g} s",
                    hint=f"its memory is kept for ever; {STUCK}",
                )
            # Polled, as synchronize() has no limit.
            time.sleep(pause_s)  # noqa: TID251 - a thread's
            pause_s = min(2 * pause_s, _LONGEST_S)

    def _slots_of(self, places: Sequence[DevicePlace]) -> Iterator[list[_Piece]]:
        """Fill one slot after the other with pieces of all places."""
        pieces: list[_Piece] = []
        at = ids_at = 0
        for index, place in enumerate(places):
            row = place.row_nbytes if isinstance(place, DeviceRows) else 0
            start = 0
            while start < place.nbytes:
                room, ids = self._slot_nbytes - at, self._table_rows - ids_at
                if pieces and (room < min(max(row, 1), self._slot_nbytes) or ids <= 0):
                    yield pieces
                    pieces, at, ids_at = [], 0, 0
                    continue
                stop = self._reach(place, start, room, ids)
                pieces.append(_Piece(index, start, stop, at, ids_at))
                at += -(-(stop - start) // _ALIGNMENT) * _ALIGNMENT
                ids_at += -(-(stop - start) // row) if row else 0
                start = stop
        if pieces:
            yield pieces

    def _reach(
        self, place: DevicePlace, start: int, room: int, ids: int | None = None
    ) -> int:
        """Return how far one piece may go: whole rows, or a part of one."""
        if isinstance(place, DeviceMemory):
            return min(start + room, place.nbytes)
        row = place.row_nbytes
        if row > room or start % row:
            return min(start + room, (start // row + 1) * row)
        count = min(room // row, self._table_rows if ids is None else ids)
        return min(start + count * row, place.nbytes)

    def _queue(
        self,
        place: DevicePlace,
        piece: _Piece,
        slot: _Slot,
        there: int,
        *,
        is_read: bool,
        landing: DeviceMemory | None = None,
    ) -> None:
        """Queue the copy of a piece of ``place`` to ``there``, or from there.

        That is an address in pinned memory, or of ``landing``, on the GPU.
        """
        copy, stream = self._cuda.copy, self._stream
        if isinstance(place, DeviceMemory):
            runs = [place.part(piece.start, piece.stop)]
        elif (found := place.runs(piece.start, piece.stop)) is not None:
            runs = found
        else:
            here = landing or self._opened().part(piece.at, piece.at + piece.nbytes)
            if landing is None and not is_read:
                copy(here.address, there, piece.nbytes, stream)
            self._index(place, piece, slot, here, is_read=is_read)
            if landing is None and is_read:
                copy(there, here.address, piece.nbytes, stream)
            return
        for run in runs:
            ends = (there, run.address) if is_read else (run.address, there)
            copy(*ends, run.nbytes, stream)
            there += run.nbytes

    def _queue_within(
        self, source: DevicePlace, target: DevicePlace, piece: _Piece
    ) -> None:
        if isinstance(target, DeviceMemory):
            middle = target.part(piece.start, piece.stop)
            if isinstance(source, DeviceMemory):
                at = source.part(piece.start, piece.stop).address
                self._cuda.copy(middle.address, at, piece.nbytes, self._stream)
                return
        elif isinstance(source, DeviceMemory):
            middle = source.part(piece.start, piece.stop)
        else:
            middle = self._opened().part(0, piece.nbytes)
        for place, is_read in ((source, True), (target, False)):
            if isinstance(place, DeviceRows):
                slot = self._take_slot()
                self._queue(
                    *(place, piece, slot, middle.address),
                    is_read=is_read,
                    landing=middle,
                )

    def _index(
        self,
        rows: DeviceRows,
        piece: _Piece,
        slot: _Slot,
        packed: DeviceMemory,
        *,
        is_read: bool,
    ) -> None:
        """Queue the gathering of whole rows into ``packed``, or their scattering."""
        first, last = piece.start // rows.row_nbytes, piece.stop // rows.row_nbytes
        ids, begin = rows.ids[first:last], 8 * piece.ids_at
        numpy.frombuffer(slot.ids.view[begin : begin + 8 * len(ids)], numpy.int64)[
            :
        ] = ids
        start = self._slot_nbytes + begin
        table = self._opened().part(start, start + 8 * len(ids))
        pinned = slot.ids.address + begin
        self._cuda.copy(table.address, pinned, table.nbytes, self._stream)
        self._tensors.move_rows(
            *(rows.table, table, packed, self._stream), is_gathered=is_read
        )

    def _opened(self) -> DeviceMemory:
        """Return the scratch memory, and have torch's kernels loaded with it.

        A first launch may keep the GPU waiting as allocating does.
        """
        if self._scratch is None:
            nbytes = self._slot_nbytes + 8 * self._table_rows
            with gpu_access(self._cuda, self._device).allocating():
                scratch = self._scratch = self._cuda.malloc(nbytes)
                spec = TensorSpec((1, 8), "uint8")
                table = self._tensors.tensor_over(scratch.part(0, 8), spec)
                slot = self._slots[0]  # no id of which is on its way: none ever was
                row = DeviceRows(table, numpy.zeros(1, numpy.int64), scratch.part(0, 8))
                for is_read in (True, False):
                    packed = scratch.part(8, 16)
                    self._index(row, _Piece(0, 0, 8), slot, packed, is_read=is_read)
                self.drain()
        return self._scratch


class DeviceLanes:
    """Lanes of any GPU, for any number of threads; CUDA is opened with the first.

    ``open_cuda`` may wait; ``tensors`` is there at once.
    """

    def __init__(
        self,
        open_cuda: Callable[[], CudaApi] = cuda_of_this_process,
        tensors: Callable[[], DeviceTensors] = TorchTensors,
        *,
        slot_nbytes: int = SLOT_NBYTES,
        table_rows: int = TABLE_ROWS,
        limit_s: float = LIMIT_S,
    ) -> None:
        self.limit_s = limit_s
        self._open_cuda, self._tensors = open_cuda, tensors
        self._make = functools.partial(
            DeviceLane, slot_nbytes=slot_nbytes, table_rows=table_rows, limit_s=limit_s
        )
        self._lock = threading.Lock()
        self._idle: dict[int, list[DeviceLane]] = {}
        self._stuck: set[int] = set()
        self._is_closed = False

    @classmethod
    def of(cls, gpus: Callable[[], Gpus]) -> DeviceLanes:
        """Return those of GPUs that are open by the time that ``gpus`` is called."""
        return cls(lambda: gpus().cuda, lambda: gpus().tensors)

    @property
    def tensors(self) -> DeviceTensors:
        """Torch's side of the GPUs. CUDA is not opened by it."""
        return self._tensors()

    @contextlib.contextmanager
    def lane(self, device: int, owners: object = None) -> Iterator[DeviceLane]:
        """Use a lane in this thread, whose device it becomes.

        When it ends, also by an error, nothing that was queued is under way. Else the
        GPU is stuck: ``owners`` and the lane are kept for ever, and there is no other.

        :raises GPUUnavailable: there is no GPU
        :raises GPUFailed: the GPU failed; what was queued may be half done
        """
        cuda = self._open_cuda()
        cuda.use_device(device)
        with self._lock:
            if device in self._stuck:
                raise GPUFailed("an earlier copy has not ended", hint=STUCK)
            idle = self._idle.setdefault(device, [])
            lane = idle.pop() if idle else None
        lane = lane or self._make(cuda, self.tensors, device)
        is_quiet = False
        try:
            try:
                yield lane
            finally:
                lane.drain()
                is_quiet = True
        finally:
            if lane.is_stuck:
                keep_for_ever((lane, owners))
                self.give_up(device)
            else:
                self._give_back(device, lane, is_usable=is_quiet)

    def give_up(self, device: int) -> None:
        """Lend no more lanes of a GPU that is stuck. In any thread."""
        with self._lock:
            self._stuck.add(device)

    def close(self) -> None:
        """Give everything back; lanes in use with their end. In a thread."""
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, {}
        for lane in itertools.chain(*idle.values()):
            lane.close()

    def close_soon(self) -> None:
        """As :meth:`close`, in a thread if there is anything to give back."""
        with self._lock:
            self._is_closed = True
            is_used = any(self._idle.values())
        if is_used:
            # No daemon: one that is in CUDA while the interpreter ends takes it down.
            threading.Thread(
                target=self.close, name="asynckv-gpu-close", daemon=False
            ).start()

    def _give_back(self, device: int, lane: DeviceLane, *, is_usable: bool) -> None:
        with self._lock:
            if is_usable and not self._is_closed:
                self._idle.setdefault(device, []).append(lane)
                return
        lane.close()
