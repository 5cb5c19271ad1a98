"""Copies between memory of a GPU and any other, and digests, off the event loop.

Between two places of a GPU the bytes never leave it, but to be digested. To and from
the host they go through pinned memory, piece by piece, so that one piece is digested
while the next is on its way.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final, TypeAlias, TypeVar

import numpy
import torch

from asynckv.protocol.wire import Digester, digest_of
from asynckv.tensors.blocks import KVBlocks, KVMemory, memory_of
from asynckv.tensors.copying import CopyPool
from asynckv.tensors.cuda import DeviceMemory, Event
from asynckv.tensors.device_lanes import SLOT_NBYTES, DeviceLane, DeviceLanes
from asynckv.tensors.device_regions import region_behind
from asynckv.tensors.device_tensors import Gpus, gpu_of
from asynckv.tensors.devices import Device
from asynckv.tensors.jobs import CopyJob
from asynckv.tensors.on_gpu import KVOnGpu, caught
from asynckv.tensors.runs import Memory, Runs, copied, landed, pieces_of
from asynckv.tensors.views import empty_tensor, spec_of
from asynckv.types import TensorSpec

__all__ = ("EDGE_NBYTES", "DeviceCopyPool")

EDGE_NBYTES: Final = 4096
_DEVICE_PIECE_NBYTES: Final = 64 * 2**20
"""A thread asks whether to go on after as much: some ten microseconds of a GPU."""

_FIRST_PAUSE_S: Final = 20e-6
_LAST_PAUSE_S: Final = 1e-3

_Place: TypeAlias = KVMemory | Runs | KVOnGpu | DeviceMemory
_T = TypeVar("_T")


class DeviceCopyPool(CopyPool):
    """A :class:`CopyPool` whose sources and targets may be on ``device``.

    Memory of a GPU is read and written once what it waits for has ended, and a call
    ends when the GPU is done with it, also when it is cancelled. Tensors there are
    contiguous. What has no byte on a GPU is done as ever.
    """

    def __init__(
        self,
        device: Device,
        opened: Callable[[], Gpus],
        threads: int = 2,
        *,
        empty: Callable[[TensorSpec], torch.Tensor],
    ) -> None:
        super().__init__(threads, empty=empty)
        self.host_empty = empty_tensor
        self._device = device
        self._opened = opened
        self.lanes = DeviceLanes(opened)

    def catch(self, memory: _T, *, is_written: bool = False) -> _T | KVOnGpu:
        if not isinstance(memory, torch.Tensor) or gpu_of(memory) is None:
            return memory
        tensor = memory.detach()
        if not is_written:
            tensor = self._dense(tensor)
        return caught(tensor, self._opened().tensors) or memory

    def memory_of(self, tensor: torch.Tensor) -> DeviceMemory:
        """Return the bytes of a tensor of the GPU. Never waits.

        :raises GPUFailed: CUDA refused
        """
        return self._opened().tensors.memory_of(tensor)

    async def copy(
        self,
        sources: Sequence[_Place],
        targets: Sequence[_Place],
        *,
        digest: bool = True,
    ) -> list[bytes]:
        if len(sources) != len(targets):
            raise ValueError(f"{len(sources)} sources and {len(targets)} targets")
        hosts = [p for p in (*sources, *targets) if not isinstance(p, DeviceMemory)]
        if len(hosts) == 2 * len(sources) and not any(map(_is_on_gpu, hosts)):
            return await super().copy(sources, targets, digest=digest)
        pairs = list(zip(sources, targets, strict=True))
        jobs = [self._job(source, target, digest) for source, target in pairs]
        del sources, targets, pairs, hosts  # a traceback would keep them alive
        return await self._do(jobs)

    async def digest(self, tensors: Sequence[_Place]) -> list[bytes]:
        if not any(isinstance(t, DeviceMemory) or _is_on_gpu(t) for t in tensors):
            return await super().digest(tensors)
        jobs = [self._job(tensor, None, True) for tensor in tensors]
        del tensors
        return await self._do(jobs)

    async def edges(self, places: Sequence[DeviceMemory]) -> list[bytes]:
        """Return the digest of the first and last bytes of each place, read back.

        A cancelled call ends when the GPU is done with it.
        """
        job = _EdgesRead(self.lanes, self._device.index, list(places))
        del places
        try:
            await self.make_and_run(lambda: [job])
        finally:
            job.places = []
        return job.edges

    async def _do(self, jobs: list[_DeviceCopy]) -> list[bytes]:
        # Never on the loop, however few bytes there are: a GPU may keep one waiting.
        try:
            await self.make_and_run(lambda: jobs)
        finally:
            for job in jobs:  # those too that were never begun
                job.forget()
        return [job.digest for job in jobs]

    def _job(self, source: _Place, target: _Place | None, digest: bool) -> _DeviceCopy:
        if target is not None and source.nbytes != target.nbytes:
            raise ValueError(f"{source.nbytes} bytes are not {target.nbytes}")
        ends = self._end(source), None if target is None else self._end(target)
        # A mark that somebody else has made is his: he may copy once more.
        made = [
            event
            for place, end in zip((source, target), ends, strict=True)
            if not isinstance(place, KVOnGpu) and (event := _mark_of(end)) is not None
        ]
        return _DeviceCopy(
            *(self.lanes, self._device.index, *ends),
            nbytes=source.nbytes,
            digest=digest,
            made=made,
        )

    def _dense(self, tensor: torch.Tensor) -> torch.Tensor:
        """Let the GPU put a tensor's elements in order, on the caller's own stream."""
        if tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
            return tensor
        dense = self._device.empty(spec_of(tensor))
        with torch.inference_mode():
            return dense.copy_(tensor)

    def _end(self, place: _Place) -> _End:
        if isinstance(place, DeviceMemory):
            return (place,)
        if isinstance(place, KVOnGpu):
            return (place.memory,)
        if isinstance(place, KVBlocks) and gpu_of(place.pool) is not None:
            pool = self._opened().tensors.memory_of(place.pool)
            return _PoolBlocks(place, pool)
        if isinstance(place, torch.Tensor) and gpu_of(place) is not None:
            return (self._opened().tensors.memory_of(self._dense(place)),)
        return place


@dataclasses.dataclass(frozen=True, slots=True)
class _PoolBlocks:
    """Blocks of a pool on a GPU. There may be too many to look at each on a loop."""

    blocks: KVBlocks
    pool: DeviceMemory


_Pieces: TypeAlias = tuple[DeviceMemory, ...] | KVMemory | Runs
"""Pieces of a GPU's memory, one after the other; or memory of the host."""

_End: TypeAlias = _Pieces | _PoolBlocks


def _is_on_gpu(place: KVMemory | Runs | KVOnGpu) -> bool:
    if isinstance(place, KVOnGpu):
        return True
    if isinstance(place, Runs):
        return False
    return gpu_of(place.pool if isinstance(place, KVBlocks) else place) is not None


def _blocks_of(blocks: KVBlocks, pool: DeviceMemory) -> tuple[DeviceMemory, ...]:
    """Return the memory of blocks; those that follow each other are one piece."""
    nbytes, ids = blocks.block_nbytes, blocks.block_ids
    begins = numpy.flatnonzero(numpy.diff(ids, prepend=-2) != 1)
    firsts, lasts = ids[begins].tolist(), ids[[*(begins[1:] - 1), -1][: len(begins)]]
    return tuple(
        pool.part(first * nbytes, (last + 1) * nbytes)
        for first, last in zip(firsts, lasts.tolist(), strict=True)
    )


class _DeviceCopy(CopyJob):
    """One tensor's bytes, from or to a GPU, or only read there."""

    def __init__(
        self,
        lanes: DeviceLanes,
        device: int,
        source: _End,
        target: _End | None,
        *,
        nbytes: int,
        digest: bool,
        made: list[Event],
    ) -> None:
        self._lanes = lanes
        self._made = made
        self._device = device
        self._source: _End | None = source
        self._target = target
        self._is_digested = digest
        self._nbytes = nbytes
        self.digest = b""

    @property
    def nbytes(self) -> int:
        return self._nbytes

    def steps(self) -> Iterator[None]:
        try:
            source, target = _pieces(self._source), _pieces(self._target)
            with self._lanes.lane(self._device) as lane:
                yield from _until_ready(source)
                yield from _until_ready(target)
                yield from self._move(lane, source, target)
        finally:
            self.forget()

    def forget(self) -> None:
        """It is over: whoever keeps the job keeps no memory."""
        self._source = self._target = None
        made, self._made = self._made, []
        for event in made:
            event.close()

    def _move(
        self, lane: DeviceLane, source: _Pieces | None, target: _Pieces | None
    ) -> Iterator[None]:
        reading = _Reading(self._nbytes)
        is_new = False
        if isinstance(source, tuple) and isinstance(target, tuple):
            yield from _within_gpus(lane, source, target)
            # What has landed is digested, not what was read.
            source, target, is_new = target, None, True
            if not self._is_digested:
                return
        if isinstance(source, tuple):
            host = None if target is None else memory_of(_host(target))
            pieces = reading.of(_from_gpu(lane, source))
            for _ in pieces if host is None else landed(pieces, host):
                yield
            self._note(reading, source, is_new=is_new)
            return
        origin = memory_of(_dense(_host(source)))
        if isinstance(target, tuple):
            yield from _to_gpu(lane, origin, target, reading)
            self._note(reading, target, is_new=True)
            return
        # Beside others of the same call that are on the GPU.
        for piece in _on_host(origin, target):
            reading.add(piece)
            yield
        self.digest = reading.digest() if self._is_digested else b""

    def _note(
        self, reading: _Reading, place: tuple[DeviceMemory, ...], *, is_new: bool
    ) -> None:
        self.digest = reading.digest() if self._is_digested else b""
        region = region_behind(place[0]) if len(place) == 1 else None
        if region is not None and region.nbytes != self._nbytes:
            return  # these are the edges of a piece
        # Of what was there they stay those of the first time: a change is noticed.
        if region is not None and (is_new or not region.edges):
            region.edges = reading.edges()


class _EdgesRead(CopyJob):
    """The first and last bytes of many places, brought to the host together."""

    def __init__(
        self, lanes: DeviceLanes, device: int, places: list[DeviceMemory]
    ) -> None:
        self.places = places
        self.edges: list[bytes] = []
        self._lanes = lanes
        self._device = device

    @property
    def nbytes(self) -> int:
        return 2 * EDGE_NBYTES * len(self.places)

    def steps(self) -> Iterator[None]:
        most = SLOT_NBYTES // (2 * EDGE_NBYTES)
        with self._lanes.lane(self._device) as lane:
            for first in range(0, len(self.places), most):
                self.edges += _read_edges(lane, self.places[first : first + most])
                yield


def _read_edges(lane: DeviceLane, places: list[DeviceMemory]) -> list[bytes]:
    slot, _ = lane.slot()
    for number, place in enumerate(places):
        edge = min(place.nbytes, EDGE_NBYTES)
        landing = slot.address + 2 * EDGE_NBYTES * number
        for begin in (place.address, place.address + place.nbytes - edge):
            if edge:
                lane.cuda.copy(landing, begin, edge, lane.stream)
            landing += edge
    lane.stream.synchronize()
    found: list[bytes] = []
    for number, place in enumerate(places):
        start = 2 * EDGE_NBYTES * number
        edges = 2 * min(place.nbytes, EDGE_NBYTES)
        found.append(digest_of(bytes(slot.view[start : start + edges])))
    return found


class _Reading:
    """Digests bytes as they pass, and keeps the first and the last of them."""

    def __init__(self, nbytes: int) -> None:
        self._edge = min(nbytes, EDGE_NBYTES)
        self._digester = Digester()
        self._head, self._tail = bytearray(), bytearray()

    def of(self, pieces: Iterator[memoryview]) -> Iterator[memoryview]:
        """Let pieces pass."""
        for piece in pieces:
            self.add(piece)
            yield piece

    def add(self, piece: memoryview) -> None:
        """These are the next bytes."""
        self._digester.update(piece)
        self._head += piece[: self._edge - len(self._head)]
        self._tail += piece[-self._edge :] if self._edge else b""
        del self._tail[: -self._edge or None]

    def digest(self) -> bytes:
        return self._digester.digest()

    def edges(self) -> bytes:
        """Return the digest of the first and the last bytes."""
        return digest_of(bytes(self._head + self._tail))


def _pieces(end: _End | None) -> _Pieces | None:
    """Return where the pieces of blocks lie; anything else as it is."""
    return _blocks_of(end.blocks, end.pool) if isinstance(end, _PoolBlocks) else end


def _until_ready(end: _Pieces | None) -> Iterator[None]:
    """Wait for what is queued before it: this thread may be told to stop meanwhile."""
    event = _mark_of(end)
    pause_s = _FIRST_PAUSE_S
    while event is not None and not event.query():
        # Polled, as synchronize() could not be told to stop.
        time.sleep(pause_s)  # noqa: TID251 - a thread's
        pause_s = min(2 * pause_s, _LAST_PAUSE_S)
        yield


def _mark_of(end: _End | None) -> Event | None:
    """Return what the bytes of a GPU wait for: of all pieces the same."""
    if isinstance(end, _PoolBlocks):
        return end.pool.ready
    return end[0].ready if isinstance(end, tuple) and end else None


def _host(end: _Pieces | None) -> KVMemory | Runs:
    if end is None or isinstance(end, tuple):
        raise TypeError("no memory of the host")
    return end


def _on_host(origin: Memory, target: KVMemory | Runs | None) -> Iterator[memoryview]:
    if target is not None:
        yield from copied(origin, memory_of(target), SLOT_NBYTES)
        return
    for start in range(0, origin.nbytes, SLOT_NBYTES):
        yield from pieces_of(origin, start, min(start + SLOT_NBYTES, origin.nbytes))


def _dense(memory: KVMemory | Runs) -> KVMemory | Runs:
    if isinstance(memory, torch.Tensor):
        return memory.detach().resolve_conj().resolve_neg().contiguous()
    return memory


def _within_gpus(
    lane: DeviceLane,
    source: tuple[DeviceMemory, ...],
    target: tuple[DeviceMemory, ...],
) -> Iterator[None]:
    queued = 0
    for to, origin in _overlaps(target, source):
        lane.cuda.copy(to.address, origin.address, to.nbytes, lane.stream)
        queued += to.nbytes
        if queued >= _DEVICE_PIECE_NBYTES:
            lane.stream.synchronize()
            queued = 0
            yield
    lane.stream.synchronize()
    yield


def _overlaps(
    ones: tuple[DeviceMemory, ...], others: tuple[DeviceMemory, ...]
) -> Iterator[tuple[DeviceMemory, DeviceMemory]]:
    """Cut both sides into pieces of equal sizes."""
    rest, done, origin = iter(others), 0, others[0]
    next(rest)
    for one in ones:
        start = 0
        while start < one.nbytes:
            if done == origin.nbytes:
                origin, done = next(rest), 0
                continue
            room = min(one.nbytes - start, origin.nbytes - done, _DEVICE_PIECE_NBYTES)
            yield one.part(start, start + room), origin.part(done, done + room)
            start += room
            done += room


def _from_gpu(
    lane: DeviceLane, source: tuple[DeviceMemory, ...]
) -> Iterator[memoryview]:
    """Yield the bytes, piece by piece; each is there until the next is asked for."""
    waiting: tuple[memoryview, Callable[[], None]] | None = None
    for part in source:
        for start in range(0, part.nbytes, SLOT_NBYTES):
            some = min(SLOT_NBYTES, part.nbytes - start)
            slot, event = lane.slot()
            lane.cuda.copy(slot.address, part.address + start, some, lane.stream)
            event.record(lane.stream)
            if waiting is not None:
                waiting[1]()
                yield waiting[0]
            waiting = slot.view[:some], event.synchronize
    if waiting is not None:
        waiting[1]()
        yield waiting[0]


def _to_gpu(
    lane: DeviceLane,
    source: Memory,
    target: tuple[DeviceMemory, ...],
    reading: _Reading,
) -> Iterator[None]:
    begin = 0
    for part in target:
        for start in range(0, part.nbytes, SLOT_NBYTES):
            some = min(SLOT_NBYTES, part.nbytes - start)
            slot, event = lane.slot()
            filled = slot.view[:some]
            pieces = iter(pieces_of(source, begin, begin + some))
            for _ in landed(pieces, filled):
                pass
            reading.add(filled)
            lane.cuda.copy(part.address + start, slot.address, some, lane.stream)
            event.record(lane.stream)
            begin += some
            yield
    lane.stream.synchronize()
