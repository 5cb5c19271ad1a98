"""Blocks of pools on a GPU into tensors of the host, and back: jobs of a copy pool.

The blocks of all pools that are alike move by one kernel at a time, through pinned
memory; from tensors of the same GPU, and to its plain memory, straight. Nothing here
waits for anybody's stream: whoever asks has waited.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Final

import numpy
import torch

from asynckv.tensors.blocks import KVBlocks
from asynckv.tensors.cuda import DeviceMemory, Event
from asynckv.tensors.device_blocks import Addresses, DeviceBlocks
from asynckv.tensors.device_tensors import DeviceTensors, gpu_of
from asynckv.tensors.jobs import CopyJob
from asynckv.tensors.on_gpu import at_once
from asynckv.tensors.runs import copied
from asynckv.tensors.staging import Stagings
from asynckv.tensors.views import bytes_of

__all__ = ("GpuPools", "gpu_mark")

_PIECE_NBYTES: Final = 2**20


def gpu_mark(tensor: torch.Tensor, tensors: DeviceTensors) -> Event | None:
    """Mark where this thread's current stream of the tensor's GPU is. Never waits.

    :raises GPUFailed: CUDA refused
    """
    return tensors.memory_of(tensor.detach().as_strided((0,), (1,))).ready


class GpuPools:
    """Where the blocks of some pools lie, which it keeps.

    :raises ValueError: a pool is on no GPU
    """

    def __init__(self, pools: Sequence[torch.Tensor], stagings: Stagings) -> None:
        self._pools = tuple(pools)
        self._stagings = stagings
        self._places = {
            id(pool): _place_of(pool, stagings.tensors) for pool in self._pools
        }

    def gathering(
        self,
        sources: Sequence[KVBlocks],
        targets: Sequence[torch.Tensor | DeviceMemory],
    ) -> list[CopyJob]:
        """Return what copies blocks of these pools into tensors of the host.

        Or into plain memory of their GPU, that is ready.

        :raises ValueError: a target is not as its blocks are
        """
        jobs: list[CopyJob] = []
        for is_here, kind in ((False, _Gathering), (True, _Leaving)):
            pairs = [
                (blocks, place)
                for blocks, place in zip(sources, targets, strict=True)
                if isinstance(place, DeviceMemory) is is_here
            ]
            groups = self._alike([one for one, _ in pairs], [one for _, one in pairs])
            jobs += [kind(self._blocks_of(some), some) for some in groups]
        return jobs

    def scattering(
        self, sources: Sequence[torch.Tensor], targets: Sequence[KVBlocks]
    ) -> list[CopyJob]:
        """Return what copies tensors, of the host or the GPU, into blocks of these.

        :raises ValueError: a source is not as its blocks are, or a block is there twice
        """
        jobs: list[CopyJob] = []
        for is_here, kind in ((False, _Scattering), (True, _Landing)):
            pairs = [
                (one, blocks)
                for one, blocks in zip(sources, targets, strict=True)
                if (gpu_of(one) is not None) is is_here
            ]
            tensors, places = [one for one, _ in pairs], [place for _, place in pairs]
            groups = self._alike(places, tensors)
            for some in groups:
                if len(numpy.unique(some.addresses)) < len(some.addresses):
                    raise ValueError("a block is there twice: what should land in it?")
            jobs += [kind(self._blocks_of(some), some) for some in groups]
        return jobs

    def _memory(
        self, tensor: torch.Tensor | DeviceMemory, place: DeviceMemory
    ) -> memoryview | DeviceMemory:
        if isinstance(tensor, DeviceMemory):
            if tensor.device != place.device:
                raise ValueError("it is on another GPU than its blocks")
            return tensor
        if gpu_of(tensor) is None:
            return bytes_of(tensor)
        if gpu_of(tensor) != place.device:  # whose memory no kernel there may read
            raise ValueError(f"it is on {tensor.device}, its blocks on another GPU")
        return at_once(tensor, self._stagings.tensors).memory

    def _blocks_of(self, some: _Alike) -> DeviceBlocks:
        return self._stagings.blocks(some.caches[0].device)

    def _alike(
        self,
        blocks: Sequence[KVBlocks],
        tensors: Sequence[torch.Tensor | DeviceMemory],
    ) -> list[_Alike]:
        """Put together what one kernel can move: pieces of one size."""
        found: dict[tuple[int, int], _Alike] = {}
        for one, tensor in zip(blocks, tensors, strict=True):
            _check_alike(one, tensor)
            if not one.nbytes:
                continue
            place = self._places[id(one.pool)]
            most = self._stagings.blocks(place.device).chunk_nbytes
            piece = _piece_of(one.block_nbytes, most)
            some = found.setdefault((place.device, piece), _Alike(piece))
            some.add(_addresses(one, place, piece), place, self._memory(tensor, place))
        return list(found.values())


@dataclasses.dataclass
class _Alike:
    """Pieces of one size, on one GPU, and what they are in the order of: ``host``
    memory, or ``here``, on that GPU.
    """

    piece_nbytes: int
    addresses: Addresses = dataclasses.field(
        default_factory=lambda: numpy.empty(0, numpy.uint64)
    )
    caches: list[DeviceMemory] = dataclasses.field(default_factory=list)
    host: list[memoryview] = dataclasses.field(default_factory=list)
    here: list[DeviceMemory] = dataclasses.field(default_factory=list)

    def add(
        self,
        addresses: Addresses,
        cache: DeviceMemory,
        packed: memoryview | DeviceMemory,
    ) -> None:
        self.addresses = numpy.concatenate([self.addresses, addresses])
        self.caches.append(cache)
        if isinstance(packed, DeviceMemory):
            self.here.append(packed)
        else:
            self.host.append(packed)

    def packed(self) -> Addresses:
        """Return where each piece is in what is here."""
        return numpy.concatenate(
            [
                numpy.uint64(memory.address)
                + numpy.arange(0, memory.nbytes, self.piece_nbytes, dtype=numpy.uint64)
                for memory in self.here
            ]
        )

    def spans(self, first: int, nbytes: int) -> Iterator[memoryview]:
        """Return where so many bytes lie, from a piece on."""
        start = first * self.piece_nbytes
        for memory in self.host:
            if some := memory[start : start + nbytes] if start < len(memory) else None:
                yield some
                nbytes -= len(some)
            start = max(0, start - len(memory))
            if not nbytes:
                return


class _Moving(CopyJob):
    def __init__(self, blocks: DeviceBlocks, some: _Alike) -> None:
        self._blocks, self._some = blocks, some

    @property
    def nbytes(self) -> int:
        return 2**30  # never on the loop, however little it is


class _Gathering(_Moving):
    def steps(self) -> Iterator[None]:
        some = self._some
        reading = self._blocks.read(some.addresses, some.piece_nbytes, some.caches)
        with contextlib.closing(reading) as slots:  # type: ignore[type-var]
            for first, packed in slots:
                done = 0
                for place in some.spans(first, len(packed)):
                    _copy(packed[done : done + len(place)], place)
                    done += len(place)
                yield


class _Scattering(_Moving):
    def steps(self) -> Iterator[None]:
        some = self._some

        def bring(first: int, slot: memoryview) -> None:
            done = 0
            for place in some.spans(first, len(slot)):
                _copy(place, slot[done : done + len(place)])
                done += len(place)

        writing = self._blocks.write(
            some.addresses, some.piece_nbytes, bring, some.caches
        )
        with contextlib.closing(writing) as slots:  # type: ignore[type-var]
            yield from slots


class _Landing(_Moving):
    """From tensors of the same GPU."""

    def steps(self) -> Iterator[None]:
        some = self._some
        used = [*some.caches, *some.here]
        self._blocks.copy(some.packed(), some.addresses, some.piece_nbytes, used)
        yield


class _Leaving(_Moving):
    """To other memory of the same GPU."""

    def steps(self) -> Iterator[None]:
        some = self._some
        used = [*some.caches, *some.here]
        self._blocks.copy(some.addresses, some.packed(), some.piece_nbytes, used)
        yield


def _check_alike(blocks: KVBlocks, other: torch.Tensor | DeviceMemory) -> None:
    if isinstance(other, DeviceMemory):
        if other.nbytes != blocks.nbytes:
            raise ValueError(f"{other.nbytes} bytes for blocks of {blocks.nbytes}")
    elif (blocks.shape, blocks.dtype) != (other.shape, other.dtype):
        raise ValueError(
            f"blocks of {blocks.dtype} {tuple(blocks.shape)} are not a tensor of "
            f"{other.dtype} {tuple(other.shape)}"
        )


def _copy(source: memoryview, target: memoryview) -> None:
    for _ in copied(source, target, _PIECE_NBYTES):
        pass


def _place_of(pool: torch.Tensor, tensors: DeviceTensors) -> DeviceMemory:
    """Return the bytes of a pool, from its first element to its last one."""
    row = pool.shape[1:].numel()
    count = (len(pool) - 1) * pool.stride(0) + row if len(pool) and row else 0
    memory = tensors.memory_of(pool.detach().as_strided((count,), (1,)))
    if memory.ready is not None:
        memory.ready.close()
    return dataclasses.replace(memory, ready=None)


def _addresses(blocks: KVBlocks, place: DeviceMemory, piece: int) -> Addresses:
    """Return where each piece of the blocks is, in their order."""
    step = blocks.pool.stride(0) * blocks.pool.element_size()
    within = numpy.arange(blocks.block_nbytes // piece, dtype=numpy.uint64)
    starts = (blocks.block_ids * step).astype(numpy.uint64) + numpy.uint64(
        place.address
    )
    found: Addresses = (starts[:, None] + within * numpy.uint64(piece)).ravel()
    return found


def _piece_of(nbytes: int, most: int) -> int:
    """Return the largest even part of a block that fits in a slot."""
    parts = -(-nbytes // most)
    while nbytes % parts:
        parts += 1
    return nbytes // parts
