from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
import torch

from asynckv.buffers.hoisting import Hoisting
from asynckv.tensors.arena import Region
from asynckv.tensors.device_arena import DeviceArena
from asynckv.tensors.device_copying import DeviceCopyPool
from asynckv.testing.expectations import is_same
from asynckv.testing.fake_devices import FakeDevice, fake_device
from asynckv.testing.lookup_checks.values import MIB, noise
from asynckv.types import TensorSpec

SPEC = TensorSpec((MIB,), "uint8")


@pytest.fixture
def gpu() -> Iterator[FakeDevice]:
    with fake_device() as gpu:
        yield gpu


@pytest.fixture
def pool(gpu: FakeDevice) -> Iterator[DeviceCopyPool]:
    device = gpu.device
    pool = DeviceCopyPool(device, device.opened, empty=device.empty)
    yield pool
    pool.close()
    pool.lanes.close()


@pytest.fixture
def arena(gpu: FakeDevice) -> Iterator[DeviceArena]:
    arena = DeviceArena(4 * MIB, gpu.device, wanted=lambda: None, freed=lambda: None)
    arena.add_slab(arena.pages.make_slab())
    yield arena
    arena.close()


def refuse(told: object) -> None:
    raise AssertionError(told)


async def filled(arena: DeviceArena, pool: DeviceCopyPool, seed: int) -> Region:
    regions = arena.allocate([MIB])
    assert regions is not None
    (region,) = regions
    await pool.copy([noise(MIB, seed)], [region.place(SPEC)])
    return region


async def test_copies_are_in_host_memory_and_come_in_turn(
    arena: DeviceArena, pool: DeviceCopyPool
) -> None:
    hoist, copies = Hoisting(pool).hoist, list[torch.Tensor]()
    regions = [await filled(arena, pool, seed) for seed in (1, 2)]
    await asyncio.gather(*(hoist(r, SPEC, copies.append, refuse) for r in regions))
    assert [copy.is_cuda for copy in copies] == [False, False]
    assert is_same(copies[0], noise(MIB, 1)) and is_same(copies[1], noise(MIB, 2))
    arena.free(regions)


async def test_what_fails_is_told(
    caplog: pytest.LogCaptureFixture, arena: DeviceArena, pool: DeviceCopyPool
) -> None:
    region, errors = await filled(arena, pool, 1), list[Exception]()
    arena.free([region])
    await Hoisting(pool).hoist(region, SPEC, refuse, errors.append)
    assert "released" in str(errors[0]) and "cannot be read" in caplog.text
    caplog.clear()
    errors.clear()


async def test_a_cancelled_copy_tells_nobody(
    arena: DeviceArena, pool: DeviceCopyPool
) -> None:
    hoisting, region = Hoisting(pool), await filled(arena, pool, 1)
    coroutines = [hoisting.hoist(region, SPEC, refuse, refuse) for _ in range(2)]
    tasks = [asyncio.create_task(one) for one in coroutines]
    await asyncio.sleep(0)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    assert all(task.cancelled() for task in tasks)
    arena.free([region])
