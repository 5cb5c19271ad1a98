"""Blocks of pools on a GPU into tensors of the host, and back: jobs of a copy pool.

Blocks of all pools move together, through pinned memory; from tensors of the same GPU,
and to its plain memory, straight. Nothing here waits for anybody's stream: whoever asks
has waited.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Final, TypeAlias

import torch

from asynckv.devices.copying import DeviceCopy, device_rows_of, pool_memory
from asynckv.devices.cuda import DeviceMemory, Event
from asynckv.devices.lanes import DeviceLanes, DeviceRows
from asynckv.devices.tensors import DeviceTensors, at_once, gpu_of
from asynckv.tensors.blocks import KVBlocks
from asynckv.tensors.jobs import CopyJob

__all__ = ("GpuPools", "gpu_mark")

_End: TypeAlias = DeviceRows | torch.Tensor | DeviceMemory

_JOB_NBYTES: Final = 16 * 2**20
"""As much is one job: so two threads share what is longer."""


def gpu_mark(tensor: torch.Tensor, tensors: DeviceTensors) -> Event | None:
    """Mark where this thread's current stream of the tensor's GPU is. Never waits.

    :raises GPUFailed: CUDA refused
    """
    return tensors.memory_of(tensor.detach().as_strided((0,), (1,))).ready


class GpuPools:
    """Where the blocks of some pools lie, which it keeps.

    :raises ValueError: a pool is on no GPU
    """

    def __init__(self, pools: Sequence[torch.Tensor], lanes: DeviceLanes) -> None:
        self._pools = tuple(pools)
        self._lanes = lanes
        self._places = {id(pool): _place_of(pool, lanes) for pool in self._pools}

    def gathering(
        self,
        sources: Sequence[KVBlocks],
        targets: Sequence[torch.Tensor | DeviceMemory],
    ) -> list[CopyJob]:
        """Return what copies blocks of these pools into tensors of the host.

        Or into plain memory of their GPU, that is ready.

        :raises ValueError: a target is not as its blocks are
        """
        return self._jobs(
            (self._rows(blocks, target), self._end(target, blocks))
            for blocks, target in zip(sources, targets, strict=True)
        )

    def scattering(
        self, sources: Sequence[torch.Tensor], targets: Sequence[KVBlocks]
    ) -> list[CopyJob]:
        """Return what copies tensors, of the host or the GPU, into blocks of these.

        :raises ValueError: a source is not as its blocks are, or a block is there twice
        """
        for blocks in targets:
            if blocks.overlaps:
                raise ValueError("a block is there twice: what should land in it?")
        return self._jobs(
            (self._end(source, blocks), self._rows(blocks, source))
            for source, blocks in zip(sources, targets, strict=True)
        )

    def _rows(self, blocks: KVBlocks, other: torch.Tensor | DeviceMemory) -> DeviceRows:
        if isinstance(other, DeviceMemory):
            if other.nbytes != blocks.nbytes:
                raise ValueError(f"{other.nbytes} bytes for blocks of {blocks.nbytes}")
        elif (blocks.shape, blocks.dtype) != (other.shape, other.dtype):
            raise ValueError(
                f"blocks of {blocks.dtype} {tuple(blocks.shape)} are not a tensor of "
                f"{other.dtype} {tuple(other.shape)}"
            )
        return device_rows_of(blocks, self._places[id(blocks.pool)])

    def _end(
        self, other: torch.Tensor | DeviceMemory, blocks: KVBlocks
    ) -> torch.Tensor | DeviceMemory:
        device = self._places[id(blocks.pool)].device
        if isinstance(other, DeviceMemory):
            if other.device != device:
                raise ValueError("it is on another GPU than its blocks")
            return other
        if gpu_of(other) is None:
            return other
        if gpu_of(other) != device:  # which the blocks' GPU may not read
            raise ValueError(f"it is on {other.device}, its blocks on another GPU")
        return at_once(other, self._lanes.tensors).memory

    def _jobs(self, pairs: Iterable[tuple[_End, _End]]) -> list[CopyJob]:
        """Put pairs of one GPU together until they are worth a job."""
        jobs: list[CopyJob] = []
        some: list[tuple[_End, _End]] = []
        nbytes, device = 0, None
        for pair in pairs:
            (there,) = {end.device for end in pair if isinstance(end, DeviceRows)}
            if not pair[0].nbytes:
                continue
            if some and (nbytes >= _JOB_NBYTES or there != device):
                jobs.append(DeviceCopy(self._lanes, some))
                some, nbytes = [], 0
            some.append(pair)
            nbytes, device = nbytes + pair[0].nbytes, there
        return [*jobs, DeviceCopy(self._lanes, some)] if some else jobs


def _place_of(pool: torch.Tensor, lanes: DeviceLanes) -> DeviceMemory:
    memory = pool_memory(pool, lanes)
    if memory.ready is not None:
        memory.ready.close()
    return dataclasses.replace(memory, ready=None)
