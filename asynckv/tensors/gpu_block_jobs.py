"""Blocks of all layers of a cache on a GPU, as one job of a copy pool."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Final

import numpy
import numpy.typing
import torch

from asynckv.tensors.cuda import DeviceMemory
from asynckv.tensors.device_blocks import Addresses, DeviceBlocks
from asynckv.tensors.device_tensors import gpu_of
from asynckv.tensors.jobs import CopyJob
from asynckv.tensors.runs import copied, runs_in
from asynckv.tensors.staging import Stagings
from asynckv.tensors.views import bytes_of

__all__ = ("LayerBlocks", "gpu_block_job")

_PIECE_NBYTES: Final = 2**20

_Ids = numpy.typing.NDArray[numpy.int64]


@dataclasses.dataclass(frozen=True)
class LayerBlocks:
    """Some blocks of a layer: their ids, and the dimension that counts them."""

    cache: torch.Tensor
    ids: _Ids
    block_dim: int

    @property
    def piece_nbytes(self) -> int:
        """Bytes of a block that lie together."""
        tail = self.cache.shape[self.block_dim + 1 :]
        return tail.numel() * self.cache.element_size()

    def offsets(self) -> _Ids:
        """Return where each piece begins in the cache, in the order of its elements."""
        outer = self.cache.shape[: self.block_dim].numel()
        of_outer = numpy.arange(outer, dtype=numpy.int64)[:, None]
        blocks = self.cache.shape[self.block_dim]
        return ((of_outer * blocks + self.ids) * self.piece_nbytes).ravel()


def gpu_block_job(
    sources: Sequence[LayerBlocks], targets: Sequence[LayerBlocks], stagings: Stagings
) -> CopyJob | None:
    """Return what copies the blocks of these layers, or ``None`` if torch has to.

    That is between two GPUs, where caches are not contiguous or blocks are read and
    written at once, and for blocks of several sizes. Work of the caller's stream that
    the caches wait for has ended before, or was given to this thread's.
    """
    layers = [*sources, *targets]
    sizes = {layer.piece_nbytes for layer in layers}
    devices = {gpu_of(layer.cache) for layer in layers} - {None}
    is_plain = all(layer.cache.is_contiguous() for layer in layers)
    if len(sizes) != 1 or len(devices) != 1 or not is_plain:
        return None
    (device,), (nbytes,) = devices, sizes
    if device is None or not nbytes:
        return None
    blocks = stagings.blocks(device)
    if nbytes > blocks.chunk_nbytes:
        return None
    ends = _end_of(sources, stagings), _end_of(targets, stagings)
    job = _GpuBlocks(*ends, nbytes, blocks)
    return None if job.overlaps else job


@dataclasses.dataclass(frozen=True)
class _OnGpu:
    addresses: Addresses
    caches: list[DeviceMemory]


@dataclasses.dataclass(frozen=True)
class _OnHost:
    """Layers of a cache of the host; pieces of all of them are counted through."""

    bases: list[memoryview]
    offsets: list[_Ids]

    def spans(self, first: int, count: int) -> Iterator[tuple[memoryview, _Ids]]:
        """Return these pieces, a layer at a time: its bytes, and where they are."""
        for base, offsets in zip(self.bases, self.offsets, strict=True):
            if some := min(count, max(0, len(offsets) - first)):
                yield base, offsets[first : first + some]
                count -= some
            first = max(0, first - len(offsets))


def _end_of(layers: Sequence[LayerBlocks], stagings: Stagings) -> _OnGpu | _OnHost:
    offsets = [layer.offsets() for layer in layers]
    if gpu_of(layers[0].cache) is None:
        return _OnHost([bytes_of(layer.cache) for layer in layers], offsets)
    caches = [stagings.tensors.memory_of(layer.cache.detach()) for layer in layers]
    found = [
        of_layer.astype(numpy.uint64) + numpy.uint64(cache.address)
        for of_layer, cache in zip(offsets, caches, strict=True)
    ]
    return _OnGpu(numpy.concatenate(found), caches)


class _GpuBlocks(CopyJob):
    def __init__(
        self,
        source: _OnGpu | _OnHost,
        target: _OnGpu | _OnHost,
        piece_nbytes: int,
        blocks: DeviceBlocks,
    ) -> None:
        self._source, self._target = source, target
        self._piece_nbytes = piece_nbytes
        self._blocks = blocks

    @property
    def overlaps(self) -> bool:
        """Whether a block is read and written."""
        if isinstance(self._source, _OnHost) or isinstance(self._target, _OnHost):
            return False
        both = numpy.intersect1d(self._source.addresses, self._target.addresses)
        return bool(len(both))

    @property
    def nbytes(self) -> int:
        return 2**30  # never on the loop, however little it is

    def steps(self) -> Iterator[None]:
        source, target = self._source, self._target
        if isinstance(source, _OnHost):
            if isinstance(target, _OnGpu):
                yield from self._up(source, target)
        elif isinstance(target, _OnHost):
            yield from self._down(source, target)
        else:
            caches = [*source.caches, *target.caches]
            nbytes = self._piece_nbytes
            self._blocks.copy(source.addresses, target.addresses, nbytes, caches)
            yield

    def _down(self, source: _OnGpu, target: _OnHost) -> Iterator[None]:
        nbytes = self._piece_nbytes
        for first, packed in self._blocks.read(source.addresses, nbytes, source.caches):
            done = 0
            for base, offsets in target.spans(first, len(packed) // nbytes):
                some = packed[done : done + len(offsets) * nbytes]
                for _ in copied(some, runs_in(base, offsets, nbytes), _PIECE_NBYTES):
                    pass
                done += len(some)
                yield

    def _up(self, source: _OnHost, target: _OnGpu) -> Iterator[None]:
        nbytes = self._piece_nbytes

        def fill(first: int, slot: memoryview) -> None:
            done = 0
            for base, offsets in source.spans(first, len(slot) // nbytes):
                some = slot[done : done + len(offsets) * nbytes]
                for _ in copied(runs_in(base, offsets, nbytes), some, _PIECE_NBYTES):
                    pass
                done += len(some)

        yield from self._blocks.write(target.addresses, nbytes, fill, target.caches)
