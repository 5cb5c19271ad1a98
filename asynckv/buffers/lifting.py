"""What came through host memory, brought to the GPU where it is wanted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from asynckv.buffers.delivery import Delivery
from asynckv.buffers.targets import match_targets
from asynckv.tensors.blocks import KVBlocks, KVMemory, tensor_at
from asynckv.tensors.copying import CopyPool
from asynckv.tensors.device_copying import DeviceCopyPool
from asynckv.tensors.device_tensors import gpu_of

__all__ = ("lift", "lift_all", "lift_some", "on_host")


def on_host(targets: Mapping[str, KVMemory]) -> dict[str, KVMemory]:
    """Return those in which bytes can land that come over a socket."""
    return {name: target for name, target in targets.items() if not _is_on_gpu(target)}


async def lift_all(
    delivery: Delivery, targets: Mapping[str, KVMemory], pool: CopyPool
) -> None:
    """Let all of a whole delivery be where it is wanted, by a copy to a GPU.

    That is in ``targets``, or on the GPU of ``pool``, if it has one. A cancelled call
    ends when no target is written any more. After that, and after an error, the
    delivery keeps no tensor.

    :raises ValueError: ``targets`` do not fit the entry
    """
    try:
        match_targets(delivery.manifest.specs, targets)
    except BaseException:
        delivery.forget()
        raise
    await lift_some(delivery, [*delivery.tensors], targets, pool)


async def lift_some(
    delivery: Delivery,
    names: Sequence[str],
    targets: Mapping[str, KVMemory],
    pool: CopyPool,
) -> None:
    """As :func:`lift_all`, of some that have landed; their ``targets`` fit.

    What these had of the host's memory is let go.
    """
    lifted = [
        name
        for name in names
        if gpu_of(delivery.tensors[name]) is None
        and _goes_to_gpu(targets.get(name), pool)
    ]
    if not lifted:
        return
    try:
        places = await _lifted(delivery, lifted, targets, pool)
    except BaseException:
        delivery.forget()
        raise
    delivery.tensors |= dict(zip(lifted, places, strict=True))


async def lift(
    delivery: Delivery, name: str, targets: Mapping[str, KVMemory], pool: CopyPool
) -> torch.Tensor:
    """As :func:`lift_all`, of one tensor that has landed."""
    tensor = delivery.tensors[name]
    if gpu_of(tensor) is not None or not _goes_to_gpu(targets.get(name), pool):
        return tensor
    (tensor,) = await _lifted(delivery, [name], targets, pool)
    return tensor


async def _lifted(
    delivery: Delivery,
    names: list[str],
    targets: Mapping[str, KVMemory],
    pool: CopyPool,
) -> list[torch.Tensor]:
    specs = delivery.manifest.specs
    places = [
        targets[name] if name in targets else pool.empty(specs[name]) for name in names
    ]
    # No list of them here: an error's traceback would keep the peer's memory in use.
    await pool.copy([delivery.tensors[n] for n in names], places, digest=False)
    return [tensor_at(place) for place in places]


def _goes_to_gpu(target: KVMemory | None, pool: CopyPool) -> bool:
    if target is None:
        return isinstance(pool, DeviceCopyPool)
    return _is_on_gpu(target)


def _is_on_gpu(target: KVMemory) -> bool:
    return gpu_of(target.pool if isinstance(target, KVBlocks) else target) is not None
