"""Values of a store: blocks of all layers, out of the caches and into others."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from asynckv.connectors.caches import BlockMoves, PagedCaches
from asynckv.connectors.store.packing import PackedBlocks
from asynckv.devices.copying import CopyPool
from asynckv.devices.lanes import DeviceLanes
from asynckv.testing.blocked import until
from harness.fake_devices import FakeDevice, fake_device, lanes_of


@pytest.fixture
def gpu() -> Iterator[FakeDevice]:
    with fake_device(seed=3, max_delay=2) as gpu:
        yield gpu


def packed_of(
    pools: dict[str, torch.Tensor],
    num_blocks: int = 1,
    groups: dict[str, int] | None = None,
    lanes: DeviceLanes | None = None,
) -> PackedBlocks:
    caches = PagedCaches(pools, None, groups)
    return PackedBlocks(BlockMoves(caches, CopyPool(lanes=lanes)), num_blocks)


async def test_blocks_of_all_layers_go_out_and_in_again() -> None:
    pools = {name: torch.randn(6, 3) for name in "abc"}
    packed = packed_of(pools, 2, {"c": 1})
    before = {name: pool.clone() for name, pool in pools.items()}
    value = await packed.gather(((4, 2), (1, 5)))
    assert value.nbytes == packed.nbytes == 64 + 3 * 2 * 12
    for pool in pools.values():
        pool.zero_()
    await packed.scatter(value, ((0, 1), (3, 4)))
    assert torch.equal(pools["a"][:2], before["a"][[4, 2]])
    assert torch.equal(pools["c"][3:5], before["c"][[1, 5]])
    assert not pools["c"][:2].any()


POOLS = {
    "of one kind": {"a": torch.randn(20, 256), "b": torch.randn(20, 256)},
    "of several lengths and dtypes": {
        "a": torch.randn(20, 4),
        "b": torch.randn(20, 5, dtype=torch.float64),
        "c": torch.randn(20, 4, dtype=torch.bfloat16),
    },
}
IDS = tuple(range(19, 3, -1))


@pytest.mark.parametrize("name", POOLS)
@pytest.mark.parametrize("count", [1, 2, 16])
async def test_a_value_is_the_blocks_of_one_layer_after_the_other(
    name: str, count: int
) -> None:
    pools = POOLS[name]
    value = await packed_of(pools, count).gather((IDS[:count],))
    parts = [pool[list(IDS[:count])] for pool in pools.values()]
    expected = torch.cat([part.flatten().view(torch.uint8) for part in parts])
    assert torch.equal(value[64:], expected)


@pytest.mark.parametrize("name", POOLS)
@pytest.mark.parametrize("first", [0, 1, 15])
@pytest.mark.parametrize("is_on_gpu", [False, True])
async def test_of_a_value_the_last_blocks_alone_are_taken(
    gpu: FakeDevice, name: str, first: int, is_on_gpu: bool
) -> None:
    value = await packed_of(POOLS[name], 16).gather((IDS,))
    pools = {at: torch.zeros_like(pool) for at, pool in POOLS[name].items()}
    if is_on_gpu:
        pools = {at: gpu.tensor(pool) for at, pool in pools.items()}
    packed = packed_of(pools, 16, lanes=lanes_of(gpu) if is_on_gpu else None)
    await packed.scatter(value, (tuple(range(16 - first)),), first)
    for at, pool in pools.items():
        assert torch.equal(pool.cpu()[: 16 - first], POOLS[name][at][list(IDS[first:])])
        assert not pool.cpu()[16 - first :].any()
    packed.moves.pool.close()
    await until(lambda: not any("asynckv-" in t.name for t in threading.enumerate()))


@pytest.mark.parametrize(("ids", "first"), [((1,), 0), ((1, 2), 1), ((1, 2, 3), 0)])
async def test_more_or_fewer_blocks_than_a_value_has_are_refused(
    ids: tuple[int, ...], first: int
) -> None:
    pools = {"a": torch.ones(6, 3)}
    packed = packed_of(pools, 2)
    value = await packed.gather(((0, 0),))
    with pytest.raises(ValueError, match="blocks of a group for those from"):
        await packed.scatter(torch.zeros_like(value), (ids,), first)
    assert pools["a"].all()
    if not first:
        with pytest.raises(ValueError, match="of a value of 2"):
            await packed.gather((ids,))


@pytest.mark.parametrize("length", [3, 2**18])
async def test_blocks_that_lie_apart_are_copied_and_nothing_between_them(
    length: int,
) -> None:
    cache = torch.randn(4, 3, length)
    before = cache.clone()
    packed = packed_of({"keys": cache[:, 0], "values": cache[:, 2]}, 2)
    value = await packed.gather(((3, 1),))
    await packed.scatter(value, ((0, 2),))
    before[[0, 2], 0], before[[0, 2], 2] = before[[3, 1], 0], before[[3, 1], 2]
    assert torch.equal(cache, before)


@pytest.mark.parametrize("block_id", [-1, 6])
async def test_a_block_that_is_none_is_neither_read_nor_written(block_id: int) -> None:
    pools = {"a": torch.ones(6, 3), "b": torch.ones(7, 3)}
    packed = packed_of(pools, 2)
    value = await packed.gather(((0, 1),))
    value[64:] = 0
    for ids in ((0, block_id), (block_id, 0)):
        with pytest.raises(IndexError, match="blocks"):
            await packed.gather((ids,))
        with pytest.raises(IndexError, match="blocks"):
            await packed.scatter(value, (ids,))
    assert all(pool.all() for pool in pools.values())


@pytest.mark.parametrize("is_on_gpu", [False, True])
async def test_no_value_goes_to_a_block_that_is_there_twice(
    gpu: FakeDevice, is_on_gpu: bool
) -> None:
    pool = torch.zeros(6, 3)
    pool = gpu.tensor(pool) if is_on_gpu else pool
    packed = packed_of({"a": pool}, 2, lanes=lanes_of(gpu) if is_on_gpu else None)
    value = await packed.gather(((4, 4),))  # to read one twice is nothing
    value[64:] = 1
    with pytest.raises(ValueError, match="a block is there twice"):
        await packed.scatter(value, ((5, 5),))
    assert not pool.cpu().any()
    packed.moves.pool.close()


async def test_a_value_of_another_size_is_refused() -> None:
    packed = packed_of({"a": torch.zeros(6, 3)})
    with pytest.raises(ValueError, match="11 bytes are no value of 1 blocks"):
        await packed.scatter(torch.zeros(11, dtype=torch.uint8), ((0,),))


@pytest.mark.parametrize(
    "others",
    [
        {"b": torch.ones(6, 2, 3)},
        {"a": torch.ones(6, 3, 2)},
        {"a": torch.ones(6, 2, 3, dtype=torch.int32)},
    ],
)
async def test_a_value_of_other_caches_is_refused_although_it_is_as_large(
    others: dict[str, torch.Tensor],
) -> None:
    pools = {"a": torch.zeros(6, 2, 3)}
    value = await packed_of(others).gather(((0,),))
    packed = packed_of(pools)
    assert value.nbytes == packed.nbytes
    with pytest.raises(ValueError, match="other layers"):
        await packed.scatter(value, ((0,),))
    assert not pools["a"].any()


async def test_a_value_on_the_gpu_of_the_blocks_goes_to_them_there(
    gpu: FakeDevice,
) -> None:
    host = {name: torch.randn(6, 256) for name in "ab"}
    value = await packed_of(host, 2).gather(((4, 1),))
    pools = {name: gpu.tensor(torch.zeros(6, 256)) for name in "ab"}
    packed = packed_of(pools, 2, lanes=lanes_of(gpu))
    await packed.scatter(gpu.tensor(value), ((2, 3),))
    await packed.scatter(gpu.tensor(value), ((5,),), 1)
    for name in "ab":
        assert torch.equal(pools[name].cpu()[[2, 3, 5]], host[name][[4, 1, 1]])
    with pytest.raises(ValueError, match="other layers"):
        await packed.scatter(gpu.tensor(torch.zeros_like(value)), ((0, 1),))
    packed.moves.pool.close()
    await until(lambda: not any("asynckv-" in t.name for t in threading.enumerate()))
    assert all(one.device >= 0 for one in gpu.process.space.allocations())
