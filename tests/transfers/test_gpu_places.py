from __future__ import annotations

import asyncio

import torch

from asynckv.tensors.blocks import KVBlocks
from asynckv.tensors.cuda import DeviceMemory
from asynckv.tensors.device_copying import DeviceCopyPool
from asynckv.tensors.growth import Growth
from asynckv.testing.blocked import until_blocked
from asynckv.testing.lookup_checks.values import MIB, noise
from asynckv.transfers.landing import may_land_on_gpu, places_on_gpu, ready_memory
from asynckv.types import TensorSpec
from harness.fake_devices import fake_device
from harness.fake_gpus.streams import Delay

SPECS = {"key": TensorSpec((MIB,), "uint8"), "hidden": TensorSpec((8,), "uint8")}


async def test_plain_tensors_of_a_gpu_may_be_written_by_it() -> None:
    with fake_device() as gpu:
        there = gpu.tensor(noise(8))
        assert may_land_on_gpu({}) and may_land_on_gpu({"key": there})
        assert not may_land_on_gpu({"key": there, "value": noise(8)})
        assert not may_land_on_gpu({"key": KVBlocks(noise(8).view(2, 4), [0])})


async def test_what_rides_is_in_host_memory() -> None:
    with fake_device() as gpu:
        growth = Growth(2 * MIB, device=gpu.device)
        await growth.open()
        pool = growth.make_pool()
        assert isinstance(pool, DeviceCopyPool)
        tensors, places = await places_on_gpu(SPECS, {}, pool)
        assert tensors["key"].is_cuda and not tensors["hidden"].is_cuda
        assert isinstance(places[0], DeviceMemory) and places[0].ready is None
        del tensors, places
        pool.close()
        await growth.aclose()


async def test_a_place_is_waited_for_until_its_owner_is_done() -> None:
    with fake_device() as gpu:
        growth = Growth(MIB, device=gpu.device)
        await growth.open()
        pool = growth.make_pool()
        assert isinstance(pool, DeviceCopyPool)
        into = {"key": gpu.tensor(torch.zeros(MIB, dtype=torch.uint8))}
        gpu.tensors.stream(0).add(Delay(50))
        placing = asyncio.create_task(places_on_gpu(SPECS, into, pool))
        await until_blocked(placing)
        tensors, _ = await placing
        assert tensors["key"] is into["key"]
        pool.close()
        await growth.aclose()


async def test_a_place_that_nobody_uses_isready_memory() -> None:
    place = DeviceMemory(1, 1, 0)
    assert await ready_memory(place) == place
