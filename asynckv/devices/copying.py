"""Copies between memory of GPUs and any other, and digests, off the event loop.

Between two places of a GPU the bytes never leave it, but to be digested. To and from
the host they go through pinned memory, piece by piece, so that one piece is digested
while the next is on its way.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator, Iterator, Mapping, Sequence
from typing import Final, TypeAlias, TypeGuard, TypeVar

import torch

from asynckv.devices.arena import region_behind
from asynckv.devices.cuda import DeviceMemory, Event
from asynckv.devices.lanes import (
    STUCK,
    DeviceLane,
    DeviceLanes,
    DevicePlace,
    DeviceRows,
    keep_for_ever,
)
from asynckv.devices.names import Device
from asynckv.devices.tensors import KVOnGpu
from asynckv.errors import GPUFailed
from asynckv.protocol.wire import Digester, digest_of
from asynckv.tensors.blocks import KVBlocks, KVMemory
from asynckv.tensors.copying import HostCopyPool
from asynckv.tensors.jobs import CopyJob
from asynckv.tensors.runs import Memory, Runs, put_at
from asynckv.tensors.views import empty_tensor, memory_of, spec_of
from asynckv.types import TensorSpec

__all__ = (
    "EDGE_NBYTES",
    "CopyPool",
    "DeviceCopy",
    "device_rows_of",
    "pool_memory",
)

EDGE_NBYTES: Final = 4096
_LEAST_NBYTES: Final = 2**20

_HostPlace: TypeAlias = KVMemory | Runs
_Place: TypeAlias = _HostPlace | KVOnGpu | DeviceMemory
_End: TypeAlias = _HostPlace | memoryview | DevicePlace
_T = TypeVar("_T")


class CopyPool(HostCopyPool):
    """A :class:`HostCopyPool` whose sources and targets may be on GPUs.

    Memory of a GPU is read and written once what it waits for has ended, and a call
    ends when the GPU is done with it, also when it is cancelled. What has no byte on a
    GPU is done as ever. ``device`` is that of a buffer's memory, which ``empty`` makes
    tensors in; ``lanes`` are closed with the pool.
    """

    def __init__(
        self,
        *,
        empty: Callable[[TensorSpec], torch.Tensor] = empty_tensor,
        device: Device | None = None,
        lanes: DeviceLanes | None = None,
    ) -> None:
        super().__init__(empty=empty)
        self.device = device
        self.lanes = lanes or DeviceLanes()
        if device is not None:
            self.host_empty = empty_tensor

    def catch(self, memory: _T, *, is_written: bool = False) -> _T | KVOnGpu:
        """Return what stands for a tensor of a GPU; anything else as it is.

        Never waits. Its bytes are what the caller's stream was given to make until now.
        What is only read may have any strides: it is copied on its GPU first, in the
        caller's stream.

        :raises ValueError: what is to be written is not contiguous
        :raises GPUFailed: CUDA refused
        """
        if not isinstance(memory, torch.Tensor) or not memory.is_cuda:
            return memory
        tensor = memory.detach()
        if not is_written:
            tensor = self._dense(tensor)
        return KVOnGpu(tensor, self.lanes.tensors.memory_of(tensor))

    def memory_of(self, tensor: torch.Tensor) -> DeviceMemory:
        """Return the bytes of a contiguous tensor of a GPU. Never waits.

        :raises GPUFailed: CUDA refused
        """
        return self.lanes.tensors.memory_of(tensor)

    async def copy(
        self,
        sources: Sequence[_Place],
        targets: Sequence[_Place],
        *,
        digest: bool = True,
    ) -> list[bytes]:
        """Copy each source into its target; return the targets' digests.

        As :meth:`HostCopyPool.copy`; what is on a GPU is only to be as many bytes, and
        is never copied at once. A tensor of a GPU is read as the caller's current
        stream makes it, and written when that has read it. On return all of it is
        there, and no GPU is at a source or a target.

        :raises ValueError: a source and its target differ, or cannot be copied
        :raises GPUUnavailable: one is on a GPU, and CuPy or a driver is missing
        :raises GPUFailed: CUDA failed, or has not ended in time
        :raises RuntimeError: the pool is closed, or the process can have no thread
        """
        if len(sources) != len(targets):
            raise ValueError(f"{len(sources)} sources and {len(targets)} targets")
        if _are_on_host(sources) and _are_on_host(targets):
            on_host = super().copy(sources, targets, digest=digest)
            del sources, targets  # a traceback would keep them alive
            return await on_host
        pairs = list(zip(sources, targets, strict=True))
        jobs = {
            number: self._job(*pair, digest)
            for number, pair in enumerate(pairs)
            if any(map(_is_on_gpu, pair))
        }
        here = [pair for number, pair in enumerate(pairs) if number not in jobs]
        at = _hosts([one for one, _ in here]), _hosts([one for _, one in here])
        on_host = super().copy(*at, digest=digest)
        del sources, targets, pairs, here, at
        return await self._do(jobs, on_host)

    async def digest(self, tensors: Sequence[_Place]) -> list[bytes]:
        """Return the digest of each tensor's elements in order, dense or not.

        A cancelled call ends when no thread, and no GPU, reads the tensors any more.

        :raises ValueError: a tensor has no bytes to be read
        :raises GPUUnavailable: as :meth:`copy` does
        :raises GPUFailed: as :meth:`copy` does
        :raises RuntimeError: the pool is closed, or the process can have no thread
        """
        if _are_on_host(tensors):
            on_host = super().digest(tensors)
            del tensors
            return await on_host
        jobs = {
            number: self._job(tensor, None, True)
            for number, tensor in enumerate(tensors)
            if _is_on_gpu(tensor)
        }
        here = [one for number, one in enumerate(tensors) if number not in jobs]
        on_host = super().digest(_hosts(here))
        del tensors, here
        return await self._do(jobs, on_host)

    async def edges(self, places: Sequence[DeviceMemory]) -> list[bytes]:
        """Return the digest of the first and last bytes of each place, read back.

        A cancelled call ends when the GPU is done with it.
        """
        ends = [
            (place.part(start, start + edge), None)
            for place in places
            for edge in (min(place.nbytes, EDGE_NBYTES),)
            for start in (0, place.nbytes - edge)
        ]
        if not ends:
            return []
        job = _EdgesRead(self.lanes, ends)
        del places, ends
        await self._do({0: job})
        return job.edges

    async def _do(
        self,
        jobs: Mapping[int, DeviceCopy],
        on_host: Coroutine[object, object, list[bytes]] | None = None,
    ) -> list[bytes]:
        """Do what needs no GPU, then the jobs; return the digests in order."""
        try:
            digests = [] if on_host is None else await on_host
            if jobs:
                await self.make_and_run(lambda: list(jobs.values()))
        finally:
            for job in jobs.values():  # those too that were never begun
                job.forget()
        for number, job in jobs.items():  # in rising order
            digests[number:number] = job.digests
        return digests

    def _end_of_threads(self) -> None:
        self.lanes.close_soon()

    def _job(self, source: _Place, target: _Place | None, digest: bool) -> DeviceCopy:
        if target is not None and source.nbytes != target.nbytes:
            raise ValueError(f"{source.nbytes} bytes are not {target.nbytes}")
        made: list[Event] = []
        end = self._end(source, made, is_written=False)
        to = None if target is None else self._end(target, made, is_written=True)
        return DeviceCopy(self.lanes, [(end, to)], digest=digest, made=made)

    def _end(self, place: _Place, made: list[Event], *, is_written: bool) -> _End:
        if isinstance(place, KVBlocks) and place.pool.is_cuda:
            memory = pool_memory(place.pool, self.lanes)
            found: _End = device_rows_of(place, memory)
        elif isinstance(place, KVOnGpu):
            return place.memory  # a mark that somebody else has made is his
        elif isinstance(caught := self.catch(place, is_written=is_written), KVOnGpu):
            found = memory = caught.memory
        else:
            return place
        if memory.ready is not None:
            made.append(memory.ready)
        return found

    def _dense(self, tensor: torch.Tensor) -> torch.Tensor:
        """Let the GPU put a tensor's elements in order, on the caller's own stream."""
        if tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
            return tensor
        if self.device is None:
            return tensor.resolve_conj().resolve_neg().contiguous()
        dense = self.device.empty(spec_of(tensor))
        with torch.inference_mode():
            return dense.copy_(tensor)


def pool_memory(pool: torch.Tensor, lanes: DeviceLanes) -> DeviceMemory:
    """Return the bytes of a pool of blocks, from its first element to its last one.

    They are ready as a tensor's are. Never waits.

    :raises GPUFailed: CUDA refused
    """
    row = pool.shape[1:].numel()
    count = (len(pool) - 1) * pool.stride(0) + row if len(pool) and row else 0
    return lanes.tensors.memory_of(pool.detach().as_strided((count,), (1,)))


def device_rows_of(blocks: KVBlocks, memory: DeviceMemory) -> DeviceRows:
    """Return blocks of a pool on a GPU, which lies in ``memory``."""
    pool = blocks.pool.detach()
    shape = len(pool), pool.shape[1:].numel()
    table = pool.as_strided(shape, (pool.stride(0), 1)).view(torch.uint8)
    return DeviceRows(table, blocks.block_ids, memory)


class DeviceCopy(CopyJob):
    """Bytes from or to a GPU, or within one, or only read there; each pair's digest.

    ``made`` are marks that it closes.
    """

    def __init__(
        self,
        lanes: DeviceLanes,
        pairs: Sequence[tuple[_End, _End | None]],
        *,
        digest: bool = False,
        made: Sequence[Event] = (),
    ) -> None:
        self.digests = [b""] * len(pairs)
        self.limit_s = lanes.limit_s
        self._lanes = lanes
        self._pairs = pairs
        self._is_digested = digest
        self._made = made
        # Never on the loop, however few bytes there are: a GPU may keep one waiting.
        self._nbytes = max(sum(source.nbytes for source, _ in pairs), _LEAST_NBYTES)
        self._device = _device_of([end for pair in pairs for end in pair])
        self._is_given_up = False

    @property
    def nbytes(self) -> int:
        return self._nbytes

    def steps(self) -> Generator[None, None, None]:
        pairs = self._pairs
        try:
            with self._lanes.lane(self._device, pairs) as lane:
                for pair in pairs:
                    for end in pair:
                        yield from _until_ready(lane, end)
                yield from self._move(lane, pairs)
        finally:
            self.forget()

    def forget(self) -> None:
        """It is over: whoever keeps the job keeps no memory."""
        if self._is_given_up:
            return
        self._pairs = ()
        made, self._made = self._made, ()
        for event in made:
            event.close()

    def give_up(self) -> Exception:
        self._is_given_up = True
        keep_for_ever((self, self._lanes))
        self._lanes.give_up(self._device)
        return GPUFailed("CUDA does not let its thread go", hint=STUCK)

    def _move(
        self, lane: DeviceLane, pairs: Sequence[tuple[_End, _End | None]]
    ) -> Iterator[None]:
        reads: list[_PairDigest] = []
        writes: list[_PairDigest] = []
        origins: list[Memory] = []
        for number, (source, target) in enumerate(pairs):
            if isinstance(target, DeviceMemory | DeviceRows):
                if not isinstance(source, DeviceMemory | DeviceRows):
                    writes.append(_PairDigest(number, target, is_new=True))
                    origins.append(_memory_of(_dense(source)))
                    continue
                yield from lane.within(source, target)
                # What has landed is digested, not what was read.
                if self._is_digested:
                    reads.append(_PairDigest(number, target, is_new=True))
            elif isinstance(source, DeviceMemory | DeviceRows):
                host = None if target is None else _memory_of(target)
                reads.append(_PairDigest(number, source, host))
        for at, piece in lane.read([one.place for one in reads]):
            reads[at].add(piece, is_digested=self._is_digested)
            yield
        for at, piece in lane.write([one.place for one in writes], origins):
            writes[at].add(piece, is_digested=self._is_digested)
            yield
        for one in (*reads, *writes):
            one.note_edges()
            if self._is_digested:
                self.digests[one.number] = one.digest()


class _EdgesRead(DeviceCopy):
    """The first and last bytes of many places, brought to the host together."""

    def __init__(
        self, lanes: DeviceLanes, ends: Sequence[tuple[DeviceMemory, None]]
    ) -> None:
        super().__init__(lanes, ends)
        self.edges: list[bytes] = []

    def _move(
        self, lane: DeviceLane, pairs: Sequence[tuple[_End, _End | None]]
    ) -> Iterator[None]:
        found = [bytearray() for _ in pairs]
        ends = [end for end, _ in pairs if isinstance(end, DeviceMemory)]
        for at, piece in lane.read(ends):
            found[at] += piece
            yield
        halves = zip(found[::2], found[1::2], strict=True)
        self.edges = [digest_of(bytes(first + last)) for first, last in halves]


class _PairDigest:
    """Takes the bytes of one pair in order, as they go between ``place`` and the host.

    What is read goes to ``host``, if there is one. A whole region remembers its first
    and last bytes: those that land there (``is_new``), else those of the first time,
    so that a change is noticed.
    """

    def __init__(
        self,
        number: int,
        place: DevicePlace,
        host: Memory | None = None,
        *,
        is_new: bool = False,
    ) -> None:
        region = region_behind(place) if isinstance(place, DeviceMemory) else None
        if region is not None and region.nbytes != place.nbytes:
            region = None  # these are the edges of a piece
        self.number, self.place = number, place
        self._region, self._is_new, self._host = region, is_new, host
        self._digester, self._done = Digester(), 0
        self.digest = self._digester.digest
        self._edge = min(place.nbytes, EDGE_NBYTES) if region is not None else 0
        self._head, self._tail = bytearray(), bytearray()

    def add(self, piece: memoryview, *, is_digested: bool) -> None:
        """These are the next bytes."""
        start = self._done
        self._done += len(piece)
        if self._host is not None:
            put_at(self._host, start, piece)
        if is_digested and isinstance(self._host, memoryview):
            self._digester.update(self._host[start : self._done])
        elif is_digested:
            self._digester.update(piece)
        if self._edge:
            self._head += piece[: self._edge - len(self._head)]
            self._tail += piece[-self._edge :]
            del self._tail[: -self._edge]

    def note_edges(self) -> None:
        """There are no more: let a region know its first and last bytes."""
        region = self._region
        if region is not None and (self._is_new or not region.edges):
            region.edges = digest_of(bytes(self._head + self._tail))


def _until_ready(lane: DeviceLane, end: _End | None) -> Iterator[None]:
    memory = end.memory if isinstance(end, DeviceRows) else end
    if isinstance(memory, DeviceMemory):
        yield from lane.until_ready(memory.ready)


def _device_of(ends: Sequence[_End | None]) -> int:
    """Return the GPU that moves the bytes: that of the blocks, if there are any."""
    places = [end for end in ends if isinstance(end, DeviceMemory | DeviceRows)]
    rows = [place for place in places if isinstance(place, DeviceRows)]
    return (rows or places)[-1].device


def _is_on_gpu(place: _Place) -> bool:
    if isinstance(place, KVOnGpu | DeviceMemory):
        return True
    if isinstance(place, Runs):
        return False
    return (place.pool if isinstance(place, KVBlocks) else place).is_cuda


def _are_on_host(places: Sequence[_Place]) -> TypeGuard[Sequence[_HostPlace]]:
    return not any(map(_is_on_gpu, places))


def _hosts(places: Sequence[_Place]) -> list[_HostPlace]:
    """Return places that are all the host's."""
    return [one for one in places if not isinstance(one, KVOnGpu | DeviceMemory)]


def _memory_of(place: _HostPlace | memoryview) -> Memory:
    return place if isinstance(place, memoryview) else memory_of(place)


def _dense(memory: _HostPlace | memoryview) -> _HostPlace | memoryview:
    if isinstance(memory, torch.Tensor):
        return memory.detach().resolve_conj().resolve_neg().contiguous()
    return memory
