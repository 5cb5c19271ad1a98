"""Memory of a GPU that is not there, and what copies to and from it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Final

import torch

from asynckv.devices.arena import DeviceArena, DeviceRegion, place_of
from asynckv.devices.copying import CopyPool
from asynckv.devices.lanes import DeviceLanes
from asynckv.tensors.views import spec_of
from harness.fake_devices import FakeDevice

__all__ = ("filled_region", "open_device_arena", "open_device_pool", "region_in")

_ARENA_NBYTES: Final = 4 * 2**20


@contextlib.contextmanager
def open_device_pool(gpu: FakeDevice) -> Iterator[CopyPool]:
    """Return the pool of a buffer on ``gpu``; leaving closes it."""
    device = gpu.device
    lanes = DeviceLanes.of(device.opened)
    pool = CopyPool(device=device, empty=device.empty, lanes=lanes)
    try:
        yield pool
    finally:
        pool.close()
        lanes.close()


@contextlib.contextmanager
def open_device_arena(
    gpu: FakeDevice, max_bytes: int = _ARENA_NBYTES
) -> Iterator[DeviceArena]:
    """Return an arena that has all of its memory of ``gpu``; leaving closes it."""
    arena = DeviceArena(max_bytes, gpu.device, wanted=lambda: None, freed=lambda: None)
    arena.add_slab(arena.pages.make_slab())
    try:
        yield arena
    finally:
        arena.close()


def region_in(arena: DeviceArena, nbytes: int) -> DeviceRegion:
    """Return so much of the GPU's memory.

    :raises LookupError: there is not as much, or so little is kept on the host
    """
    regions = arena.allocate([nbytes]) or ()
    for region in regions:
        if isinstance(region, DeviceRegion):
            return region
    raise LookupError(f"{nbytes} bytes are not on the GPU")


async def filled_region(
    arena: DeviceArena, pool: CopyPool, tensor: torch.Tensor
) -> DeviceRegion:
    """As :func:`region_in`, with the bytes of a tensor in it."""
    region = region_in(arena, tensor.nbytes)
    await pool.copy([tensor], [place_of(region, spec_of(tensor))])
    return region
