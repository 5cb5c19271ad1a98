"""Where a delivery from another GPU lands: on this one, but for what rides."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping
from typing import Final

import torch

from asynckv.links.riding import rides
from asynckv.tensors.blocks import KVBlocks, KVMemory, memory_of
from asynckv.tensors.cuda import DeviceMemory
from asynckv.tensors.device_copying import DeviceCopyPool
from asynckv.tensors.device_tensors import gpu_of
from asynckv.tensors.runs import Memory
from asynckv.types import TensorSpec

__all__ = ("may_land_on_gpu", "places_on_gpu", "ready_memory")

_LOOK_AGAIN_S: Final = 1e-3


def may_land_on_gpu(targets: Mapping[str, KVMemory]) -> bool:
    """Whether NCCL can write to all of them: plain tensors of a GPU, and no others."""
    return all(
        not isinstance(target, KVBlocks) and gpu_of(target) is not None
        for target in targets.values()
    )


async def places_on_gpu(
    specs: Mapping[str, TensorSpec],
    targets: Mapping[str, KVMemory],
    pool: DeviceCopyPool,
) -> tuple[dict[str, torch.Tensor], list[Memory | DeviceMemory]]:
    """Return tensors, and their memory; what rides is in host memory, to be lifted.

    Waits until the GPU has done all that it was given with them before. A cancelled
    call leaves nothing.
    """
    tensors, places = dict[str, torch.Tensor](), list[Memory | DeviceMemory]()
    for name, spec in specs.items():
        if rides(spec.nbytes):
            tensors[name] = pool.host_empty(spec)
            places.append(memory_of(tensors[name]))
            continue
        target = targets.get(name)
        tensor = target if isinstance(target, torch.Tensor) else pool.empty(spec)
        tensors[name] = tensor
        places.append(await ready_memory(pool.memory_of(tensor)))
    return tensors, places


async def ready_memory(memory: DeviceMemory) -> DeviceMemory:
    """Return memory that nothing is queued for any more. A cancelled call leaves none.

    What the memory waits for is not asked again.
    """
    # Asked, not waited for by a stream: those of CUDA cannot wait for torch's events.
    if (ready := memory.ready) is not None:
        try:
            while not ready.query():  # noqa: ASYNC110 - a GPU tells nobody
                await asyncio.sleep(_LOOK_AGAIN_S)
        finally:
            ready.close()
    return dataclasses.replace(memory, ready=None)
