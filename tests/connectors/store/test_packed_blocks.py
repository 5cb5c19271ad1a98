from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from asynckv.connectors.caches import BlockMoves, PagedCaches
from asynckv.connectors.store.transfers import PackedBlocks
from asynckv.devices.copying import CopyPool
from asynckv.testing.blocked import until
from harness.fake_devices import FakeDevice, fake_device, lanes_of


@pytest.fixture
def gpu() -> Iterator[FakeDevice]:
    with fake_device(seed=3, max_delay=2) as gpu:
        yield gpu


def spool_of(
    pools: dict[str, torch.Tensor], groups: dict[str, int] | None = None
) -> PackedBlocks:
    return PackedBlocks(BlockMoves(PagedCaches(pools, None, groups), CopyPool()))


async def test_a_block_of_all_layers_goes_out_and_in_again() -> None:
    pools = {name: torch.randn(6, 3) for name in "abc"}
    packed = spool_of(pools, {"c": 1})
    before = {name: pool.clone() for name, pool in pools.items()}
    value = await packed.gather(((4, 2), (1, 5)), 1)
    assert value.nbytes == packed.block_nbytes == 64 + 3 * 12
    for pool in pools.values():
        pool.zero_()
    await packed.scatter(value, ((0,), (3,)), 0)
    assert torch.equal(pools["a"][0], before["a"][2])
    assert torch.equal(pools["c"][3], before["c"][5])
    assert not pools["c"][0].any()


async def test_layers_of_several_lengths_and_dtypes_lie_one_behind_the_other() -> None:
    pools = {
        "a": torch.randn(6, 4),
        "b": torch.randn(6, 5, dtype=torch.float64),
        "c": torch.randn(6, 4, dtype=torch.bfloat16),
    }
    packed = spool_of(pools)
    value = await packed.gather(((4,),), 0)
    blocks = [pool[4].contiguous().view(torch.uint8) for pool in pools.values()]
    assert torch.equal(value[64:], torch.cat(blocks))
    before = {name: pool[4].clone() for name, pool in pools.items()}
    await packed.scatter(value, ((1,),), 0)
    assert all(torch.equal(pool[1], before[name]) for name, pool in pools.items())


async def test_a_value_of_another_size_is_refused() -> None:
    packed = spool_of({"a": torch.zeros(6, 3)})
    with pytest.raises(ValueError, match="no block of 76"):
        await packed.scatter(torch.zeros(11, dtype=torch.uint8), ((0,),), 0)


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
    value = await spool_of(others).gather(((0,),), 0)
    packed = spool_of(pools)
    assert value.nbytes == packed.block_nbytes
    with pytest.raises(ValueError, match="other layers"):
        await packed.scatter(value, ((0,),), 0)
    assert not pools["a"].any()


async def test_a_value_on_the_gpu_of_the_blocks_goes_to_them_there(
    gpu: FakeDevice,
) -> None:
    host = {name: torch.randn(6, 256) for name in "ab"}
    value = await spool_of(host).gather(((4,),), 0)
    pools = {name: gpu.tensor(torch.zeros(6, 256)) for name in "ab"}
    moves = BlockMoves(PagedCaches(pools, None), CopyPool(lanes=lanes_of(gpu)))
    packed = PackedBlocks(moves)
    await packed.scatter(gpu.tensor(value), ((2,),), 0)
    assert all(torch.equal(pools[n].cpu()[2], host[n][4]) for n in "ab")
    with pytest.raises(ValueError, match="other layers"):
        await packed.scatter(gpu.tensor(torch.zeros_like(value)), ((0,),), 0)
    moves.pool.close()
    await until(lambda: not any("asynckv-" in t.name for t in threading.enumerate()))
    assert all(one.device >= 0 for one in gpu.process.space.allocations())
