from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from asynckv.buffers.hoisting import Hoisting
from asynckv.buffers.host_copies import HostCopies
from asynckv.errors import GPUFailed
from asynckv.tensors.arena import Region
from asynckv.tensors.device_arena import DeviceArena
from asynckv.tensors.device_copying import DeviceCopyPool
from asynckv.tensors.views import tensor_over
from asynckv.testing.blocked import until, until_blocked
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
    hoist, copies = Hoisting(pool, HostCopies()).hoist, list[memoryview]()
    regions = [await filled(arena, pool, seed) for seed in (1, 2)]
    await asyncio.gather(*(hoist(r, SPEC, copies.append, refuse) for r in regions))
    first, second = (tensor_over(copy, SPEC) for copy in copies)
    assert is_same(first, noise(MIB, 1)) and is_same(second, noise(MIB, 2))
    arena.free(regions)


async def test_what_fails_is_told(
    caplog: pytest.LogCaptureFixture, arena: DeviceArena, pool: DeviceCopyPool
) -> None:
    region, errors = await filled(arena, pool, 1), list[Exception]()
    arena.free([region])
    copies = HostCopies()
    await Hoisting(pool, copies).hoist(region, SPEC, refuse, errors.append)
    assert "released" in str(errors[0]) and "cannot be read" in caplog.text
    await until(lambda: not copies.used_bytes)
    caplog.clear()
    errors.clear()


async def test_a_cancelled_copy_tells_nobody(
    arena: DeviceArena, pool: DeviceCopyPool
) -> None:
    copies = HostCopies()
    hoisting, region = Hoisting(pool, copies), await filled(arena, pool, 1)
    coroutines = [hoisting.hoist(region, SPEC, refuse, refuse) for _ in range(2)]
    tasks = [asyncio.create_task(one) for one in coroutines]
    await asyncio.sleep(0)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    assert all(task.cancelled() for task in tasks)
    await until(lambda: not copies.used_bytes)  # though the tasks are kept
    arena.free([region])


async def test_a_copy_that_fails_on_its_gpu_is_kept_by_nobody(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    gpu: FakeDevice,
    arena: DeviceArena,
    pool: DeviceCopyPool,
) -> None:
    def fail(*anything: object) -> None:
        raise GPUFailed("it has fallen off the bus")

    copies, errors = HostCopies(), list[Exception]()
    region = await filled(arena, pool, 1)
    with monkeypatch.context() as patch:
        patch.setattr(gpu.process.cuda, "copy", fail)
        await Hoisting(pool, copies).hoist(region, SPEC, refuse, errors.append)
    await until(lambda: not copies.used_bytes)
    assert "off the bus" in str(errors[0]) and caplog.records
    caplog.clear()
    arena.free([region])


async def test_who_cannot_be_told_of_a_copy_is_told_of_that(
    caplog: pytest.LogCaptureFixture, arena: DeviceArena, pool: DeviceCopyPool
) -> None:
    def fail(told: object) -> None:
        raise MemoryError

    copies, errors = HostCopies(), list[Exception]()
    hoisting, region = Hoisting(pool, copies), await filled(arena, pool, 1)
    await hoisting.hoist(region, SPEC, fail, errors.append)
    await hoisting.digest(region, SPEC, fail, errors.append)
    assert [type(error) for error in errors] == [MemoryError] * 2
    caplog.clear()
    errors.clear()
    await until(lambda: not copies.used_bytes)
    arena.free([region])


async def test_each_copy_waits_until_others_are_gone(
    arena: DeviceArena, pool: DeviceCopyPool
) -> None:
    hoisting, copies = Hoisting(pool, HostCopies(MIB)), list[memoryview]()
    regions = [await filled(arena, pool, seed) for seed in (1, 2)]
    hoist = hoisting.hoist
    tasks = [
        asyncio.create_task(hoist(region, SPEC, copies.append, refuse))
        for region in regions
    ]
    await until(lambda: bool(copies))
    await until_blocked(*tasks)
    assert len(copies) == 1
    copies.clear()
    await asyncio.wait(tasks)
    assert len(copies) == 1
    arena.free(regions)


async def test_a_digest_waits_for_no_copy_to_be_sent(
    arena: DeviceArena, pool: DeviceCopyPool
) -> None:
    hoisting, copies = Hoisting(pool, HostCopies(MIB)), list[memoryview]()
    region, digests = await filled(arena, pool, 1), list[bytes]()
    await hoisting.hoist(region, SPEC, copies.append, refuse)
    waiting = asyncio.create_task(hoisting.hoist(region, SPEC, copies.append, refuse))
    await until_blocked(waiting)
    await hoisting.digest(region, SPEC, digests.append, refuse)
    assert len(digests) == len(copies) == 1
    copies.clear()
    await waiting
    arena.free([region])


async def test_what_cannot_be_digested_is_told(
    caplog: pytest.LogCaptureFixture, arena: DeviceArena, pool: DeviceCopyPool
) -> None:
    region, errors = await filled(arena, pool, 1), list[Exception]()
    arena.free([region])
    hoisting = Hoisting(pool, HostCopies())
    await hoisting.digest(region, SPEC, refuse, errors.append)
    assert "released" in str(errors[0]) and "cannot be digested" in caplog.text
    caplog.clear()
