from __future__ import annotations

import dataclasses

import pytest
import torch

from asynckv.devices.copying import CopyPool
from asynckv.devices.lanes import DeviceLanes
from asynckv.devices.pools import GpuPools
from asynckv.devices.tensors import at_once
from asynckv.tensors.blocks import KVBlocks
from harness.fake_gpus.tensors import FakeTensors


def _pools(width: int = 16) -> list[torch.Tensor]:
    return [torch.randint(0, 256, (9, width), dtype=torch.uint8) for _ in range(3)]


@pytest.mark.parametrize("width", [16, 7, 4096, 2500])
async def test_blocks_of_some_pools_come_to_the_host_and_go_back(
    gpu_pool: CopyPool, tensors: FakeTensors, lanes: DeviceLanes, width: int
) -> None:
    caches, ids = _pools(width), [7, 3, 4]
    on_gpu = [tensors.on_gpu(cache) for cache in caches]
    pools = GpuPools(on_gpu, lanes)
    found = [torch.zeros(3, width, dtype=torch.uint8) for _ in caches]
    blocks = [KVBlocks(cache, ids) for cache in on_gpu]
    await gpu_pool.make_and_run(lambda: pools.gathering(blocks, found))
    assert all(torch.equal(f, c[ids]) for f, c in zip(found, caches, strict=True))
    landing = [KVBlocks(cache, [0, 8, 1]) for cache in on_gpu]
    await gpu_pool.make_and_run(lambda: pools.scattering(found, landing))
    for cache, now in zip(caches, on_gpu, strict=True):
        cache[[0, 8, 1]] = cache[ids]
        assert torch.equal(now.cpu(), cache)


async def test_pools_of_several_widths_move_together(
    gpu_pool: CopyPool, tensors: FakeTensors, lanes: DeviceLanes
) -> None:
    caches = [*_pools(16), *_pools(48)]
    on_gpu = [tensors.on_gpu(cache) for cache in caches]
    blocks = [KVBlocks(cache, [5, 1]) for cache in on_gpu]
    found = [torch.zeros_like(cache[:2]) for cache in caches]
    (job,) = GpuPools(on_gpu, lanes).gathering(blocks, found)
    await gpu_pool.run([job])
    assert all(map(torch.equal, found, [cache[[5, 1]] for cache in caches]))


async def test_pools_may_lie_beside_each_other_in_one_tensor(
    gpu_pool: CopyPool, tensors: FakeTensors, lanes: DeviceLanes
) -> None:
    cache = torch.randint(0, 256, (9, 2, 16), dtype=torch.uint8)
    on_gpu = tensors.on_gpu(cache)
    values = on_gpu[:, 1]
    found, blocks = torch.zeros(2, 16, dtype=torch.uint8), KVBlocks(values, [8, 2])
    pools = GpuPools([values], lanes)
    await gpu_pool.make_and_run(lambda: pools.gathering([blocks], [found]))
    assert torch.equal(found, cache[[8, 2], 1])


async def test_what_is_on_another_gpu_is_refused(
    tensors: FakeTensors, lanes: DeviceLanes
) -> None:
    cache = tensors.on_gpu(_pools()[0])
    pools = GpuPools([cache], lanes)
    elsewhere = tensors.on_gpu(torch.zeros(1, 16, dtype=torch.uint8), 1)
    with pytest.raises(ValueError, match="is on cuda:1"):
        pools.scattering([elsewhere], [KVBlocks(cache, [1])])


async def test_what_does_not_fit_is_refused(
    tensors: FakeTensors, lanes: DeviceLanes
) -> None:
    cache = tensors.on_gpu(_pools()[0])
    pools = GpuPools([cache], lanes)
    with pytest.raises(ValueError, match="are not a tensor"):
        pools.gathering([KVBlocks(cache, [1])], [torch.zeros(1, 16)])
    twice = torch.zeros(2, 16, dtype=torch.uint8)
    with pytest.raises(ValueError, match="there twice"):
        pools.scattering([twice], [KVBlocks(cache, [1, 1])])


@pytest.mark.parametrize("width", [16, 7, 4096])
async def test_tensors_of_the_gpu_land_in_blocks_without_leaving_it(
    gpu_pool: CopyPool, tensors: FakeTensors, lanes: DeviceLanes, width: int
) -> None:
    caches = _pools(width)
    on_gpu = [tensors.on_gpu(cache) for cache in caches]
    pools, values = GpuPools(on_gpu, lanes), [cache[2:5] for cache in caches]
    landing = [KVBlocks(cache, [0, 8, 1]) for cache in on_gpu]
    sources = [tensors.on_gpu(values[0]), values[1], tensors.on_gpu(values[2])]
    await gpu_pool.make_and_run(lambda: pools.scattering(sources, landing))
    for cache, value, now in zip(caches, values, on_gpu, strict=True):
        expected = cache.clone()
        expected[[0, 8, 1]] = value
        assert torch.equal(now.cpu(), expected)


async def test_no_block_is_landed_in_twice_from_the_gpu(
    tensors: FakeTensors, lanes: DeviceLanes
) -> None:
    cache = tensors.on_gpu(_pools()[0])
    with pytest.raises(ValueError, match="twice"):
        GpuPools([cache], lanes).scattering(
            [tensors.on_gpu(_pools()[0][:2])], [KVBlocks(cache, [4, 4])]
        )


@pytest.mark.parametrize("width", [16, 7, 4096, 2500])
async def test_blocks_are_gathered_in_other_memory_of_their_gpu(
    gpu_pool: CopyPool, tensors: FakeTensors, lanes: DeviceLanes, width: int
) -> None:
    caches, ids = _pools(width), [7, 3, 4]
    on_gpu = [tensors.on_gpu(cache) for cache in caches]
    pools = GpuPools(on_gpu, lanes)
    there = [tensors.on_gpu(torch.zeros(3, width, dtype=torch.uint8)) for _ in caches]
    places = [at_once(one, tensors).memory for one in there]
    blocks = [KVBlocks(cache, ids) for cache in on_gpu]
    await gpu_pool.make_and_run(lambda: pools.gathering(blocks, places))
    for cache, found in zip(caches, there, strict=True):
        assert torch.equal(found.cpu(), cache[ids])


async def test_memory_of_another_length_or_gpu_is_refused(
    tensors: FakeTensors, lanes: DeviceLanes
) -> None:
    cache = tensors.on_gpu(torch.zeros(9, 16, dtype=torch.uint8))
    pools, blocks = GpuPools([cache], lanes), [KVBlocks(cache, [1])]
    place = at_once(cache, tensors).memory
    with pytest.raises(ValueError, match="144 bytes for blocks of 16"):
        pools.gathering(blocks, [place])
    other = dataclasses.replace(place.part(0, 16), device=1)
    with pytest.raises(ValueError, match="on another GPU"):
        pools.gathering(blocks, [other])


async def test_no_blocks_are_no_work(tensors: FakeTensors, lanes: DeviceLanes) -> None:
    on_gpu = tensors.on_gpu(_pools()[0])
    pools, none = GpuPools([on_gpu], lanes), torch.zeros(0, 16, dtype=torch.uint8)
    assert not pools.gathering([KVBlocks(on_gpu, [])], [none])
    assert not pools.scattering([none], [KVBlocks(on_gpu, [])])
