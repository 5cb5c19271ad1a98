"""Blocks of a paged cache on a GPU, gathered and scattered by one kernel at a time.

A kernel takes blocks of all layers: a table says where each one is and where it goes.
Long runs are plain copies instead. One thread at a time, which may wait here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final, TypeAlias

import numpy
import numpy.typing

from asynckv.errors import GPUFailed
from asynckv.tensors.cuda import CudaApi, DeviceMemory, Event, PinnedMemory, Stream
from asynckv.tensors.device_moves import free_pinned, keep_for_ever
from asynckv.tensors.quiet_gpus import quiet_gpu

__all__ = ("Addresses", "DeviceBlocks", "run_starts")

Addresses: TypeAlias = numpy.typing.NDArray[numpy.uint64]

_TABLE_BLOCKS: Final = 64 * 1024
_LONG_RUN_NBYTES: Final = 2**20
_SHORTEST_S: Final = 20e-6
_LONGEST_S: Final = 1e-3


@dataclasses.dataclass
class _Turn:
    """What one kernel needs, while the other turn's is at work."""

    slot: PinnedMemory
    table: PinnedMemory
    device_table: DeviceMemory
    event: Event
    is_begun: bool = False


class DeviceBlocks:
    """Moves blocks of one GPU: between places of it, to the host and from it.

    It has two pinned slots of ``chunk_nbytes`` and two tables, made with the first
    copy. ``grid`` bounds the multiprocessors that a kernel takes from decoding.
    """

    def __init__(
        self,
        open_cuda: Callable[[], CudaApi],
        device: int,
        *,
        chunk_nbytes: int = 8 * 2**20,
        table_blocks: int = _TABLE_BLOCKS,
        grid: int = 16,
        limit_s: float = 30.0,
    ) -> None:
        self.device = device
        self.chunk_nbytes = chunk_nbytes
        self._open_cuda = open_cuda
        self._table_blocks = table_blocks
        self._grid, self._limit_s = grid, limit_s
        self._lock = threading.Lock()
        self._cuda: CudaApi | None = None
        self._stream: Stream | None = None
        self._turns: list[_Turn] = []
        self._is_stuck = False

    def copy(
        self,
        sources: Addresses,
        targets: Addresses,
        nbytes: int,
        caches: Sequence[DeviceMemory] = (),
    ) -> None:
        """Copy blocks of ``nbytes`` each within the GPU; it is done then.

        No two targets overlap, nor a target and a source. First the streams are waited
        for in which ``caches`` were made, which it keeps if it never ends.

        :raises GPUFailed: CUDA failed, or has not ended in time
        """
        with self._turned(caches) as turns:
            for number, start in enumerate(range(0, len(sources), self._table_blocks)):
                turn = turns[number % 2]
                self._wait(turn)
                part = slice(start, start + self._table_blocks)
                self._begin(turn, sources[part], targets[part], nbytes)

    def read(
        self, sources: Addresses, nbytes: int, caches: Sequence[DeviceMemory] = ()
    ) -> Iterator[tuple[int, memoryview]]:
        """Gather blocks and yield the packed ones, each time from which one on.

        The next are on their way meanwhile. Exhausted or closed: the GPU is at none.

        :raises GPUFailed: CUDA failed, or has not ended in time
        :raises ValueError: a block is larger than a slot
        """
        step = self._blocks_a_slot(nbytes)
        with self._turned(caches) as turns:
            starts = range(0, len(sources), step)
            for number, start in enumerate([*starts, None]):
                if start is not None:
                    self._gather(
                        turns[number % 2], sources[start : start + step], nbytes
                    )
                if number:
                    before = turns[(number - 1) % 2]
                    self._wait(before)
                    first = starts[number - 1]
                    count = min(step, len(sources) - first)
                    yield first, before.slot.view[: count * nbytes]

    def write(
        self,
        targets: Addresses,
        nbytes: int,
        fill: Callable[[int, memoryview], None],
        caches: Sequence[DeviceMemory] = (),
    ) -> Iterator[None]:
        """Scatter packed blocks that ``fill(first, slot)`` brings; yield in between.

        Exhausted: all of them are there. Closed: the GPU is at none of them.

        :raises GPUFailed: CUDA failed, or has not ended in time
        :raises ValueError: a block is larger than a slot
        """
        step = self._blocks_a_slot(nbytes)
        with self._turned(caches) as turns:
            for number, start in enumerate(range(0, len(targets), step)):
                turn, some = turns[number % 2], targets[start : start + step]
                self._wait(turn)
                fill(start, turn.slot.view[: len(some) * nbytes])
                packed = _packed(turn.slot.address, len(some), nbytes)
                self._begin(turn, packed, some, nbytes)
                yield

    def close(self) -> None:
        """Give everything back; waits for a copy that is under way. On no loop.

        :raises GPUFailed: CUDA failed
        """
        with self._lock:
            cuda, self._cuda = self._cuda, None
            turns, self._turns = self._turns, []
            stream, self._stream = self._stream, None
            if cuda is None or stream is None or self._is_stuck:
                return
            cuda.use_device(self.device)
            with quiet_gpu(cuda, self.device).allocating():
                for turn in turns:
                    turn.event.close()
                    for pinned in (turn.slot, turn.table):
                        free_pinned(cuda, pinned)
                    cuda.free(turn.device_table)
            stream.close()

    @contextlib.contextmanager
    def _turned(self, caches: Sequence[DeviceMemory]) -> Iterator[list[_Turn]]:
        with self._lock:
            self._open()
            for cache in caches:
                if cache.ready is not None:
                    self._wait_for(cache.ready, "the caller's stream")
            try:
                yield self._turns
                self._wait_for_all()
            except BaseException:
                with contextlib.suppress(GPUFailed):
                    self._wait_for_all()
                if self._is_stuck:  # whichever of the waits found it out
                    keep_for_ever(tuple(caches))
                raise

    def _wait_for_all(self) -> None:
        for turn in self._turns:
            self._wait(turn)

    def _open(self) -> None:
        if self._is_stuck:
            raise GPUFailed("an earlier copy of blocks has not ended")
        if self._cuda is not None:
            self._cuda.use_device(self.device)
            return
        cuda = self._open_cuda()
        cuda.use_device(self.device)
        cuda.compile_kernels()
        self._stream = cuda.stream()
        table_nbytes = 16 * self._table_blocks
        with quiet_gpu(cuda, self.device).allocating():
            for _ in range(2):
                turn = _Turn(
                    cuda.host_alloc(self.chunk_nbytes),
                    cuda.host_alloc(table_nbytes),
                    cuda.malloc(table_nbytes),
                    cuda.event(),
                )
                self._turns.append(turn)
        self._cuda = cuda

    def _blocks_a_slot(self, nbytes: int) -> int:
        if not 0 < nbytes <= self.chunk_nbytes:
            raise ValueError(
                f"a block of {nbytes} bytes; a slot has {self.chunk_nbytes}"
            )
        return min(self.chunk_nbytes // nbytes, self._table_blocks)

    def _gather(self, turn: _Turn, sources: Addresses, nbytes: int) -> None:
        packed = _packed(turn.slot.address, len(sources), nbytes)
        self._begin(turn, sources, packed, nbytes)

    def _begin(
        self, turn: _Turn, sources: Addresses, targets: Addresses, nbytes: int
    ) -> None:
        cuda, stream = self._cuda, self._stream
        if cuda is None or stream is None:
            raise RuntimeError("the blocks of this GPU are closed")
        try:
            starts = run_starts(sources, targets, nbytes)
            if len(starts) * _LONG_RUN_NBYTES <= len(sources) * nbytes:
                ends = [*starts[1:].tolist(), len(sources)]
                for start, end in zip(starts.tolist(), ends, strict=True):
                    place = int(targets[start]), int(sources[start])
                    cuda.copy(*place, (end - start) * nbytes, stream)
            else:
                table = numpy.frombuffer(turn.table.view, numpy.uint64)
                count = len(sources)
                table[:count] = sources
                table[count : 2 * count] = targets
                device_table = turn.device_table
                cuda.copy(device_table.address, turn.table.address, 16 * count, stream)
                cuda.copy_blocks(device_table, count, nbytes, stream, grid=self._grid)
        finally:  # also some of it may be under way
            turn.event.record(stream)
            turn.is_begun = True

    def _wait(self, turn: _Turn) -> None:
        if turn.is_begun:
            turn.is_begun = False
            try:
                self._wait_for(turn.event, "a copy of blocks")
            except GPUFailed:
                self._is_stuck = True
                keep_for_ever(self)
                raise

    def _wait_for(self, event: Event, what: str) -> None:
        end_s, pause_s = time.monotonic() + self._limit_s, _SHORTEST_S
        while not event.query():
            if time.monotonic() > end_s:
                raise GPUFailed(
                    f"{what} has not ended within {self._limit_s:g} s",
                    hint="the GPU or its driver is stuck: nvidia-smi",
                )
            # Polled, as synchronize() has no limit and could never be given up.
            time.sleep(pause_s)  # noqa: TID251 - a thread's
            pause_s = min(2 * pause_s, _LONGEST_S)


def run_starts(
    sources: Addresses, targets: Addresses, nbytes: int
) -> numpy.typing.NDArray[numpy.intp]:
    """Return which blocks do not follow the one before them on both sides."""
    is_first = numpy.ones(len(sources), dtype=bool)
    step = numpy.uint64(nbytes)
    is_first[1:] = (numpy.diff(sources) != step) | (numpy.diff(targets) != step)
    return is_first.nonzero()[0]


def _packed(address: int, count: int, nbytes: int) -> Addresses:
    offsets = numpy.arange(count, dtype=numpy.uint64) * numpy.uint64(nbytes)
    return offsets + numpy.uint64(address)
