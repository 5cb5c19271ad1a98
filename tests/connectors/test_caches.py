from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Sequence

import pytest
import torch

from asynckv.connectors.caches import BlockMoves, PagedCaches, Staging
from asynckv.devices.copying import CopyPool
from asynckv.devices.cuda import Event
from asynckv.devices.tensors import at_once
from asynckv.errors import GPUFailed
from asynckv.parallel.shapes import KVLayout
from asynckv.tensors.blocks import KVBlocks
from asynckv.testing.blocked import until, until_blocked
from harness.engines.toy_model import ToyModel
from harness.engines.toy_pairs import toy_shape
from harness.fake_devices import FakeDevice, lanes_of

MODEL = ToyModel()


def test_a_split_layout_has_two_pools_a_layer() -> None:
    caches = PagedCaches({"a": torch.zeros(2, 8, 16, 4, 8)}, toy_shape(MODEL))
    assert [tuple(pool.shape) for pool in caches.pools("a")] == [(8, 16, 4, 8)] * 2
    assert set(caches.specs(((1, 2, 3),))) == {"a.key", "a.value"}
    assert caches.specs(((1, 2, 3),))["a.value"].shape == (3, 16, 4, 8)


def test_without_a_shape_a_layer_is_one_pool_of_blocks() -> None:
    caches = PagedCaches({"a": torch.zeros(8, 3)}, None)
    assert list(caches.blocks("a", ((0, 7),))) == ["a.key"]


def test_each_layer_takes_the_blocks_of_its_group() -> None:
    pools = {"a": torch.zeros(8, 3), "b": torch.zeros(8, 3)}
    caches = PagedCaches(pools, None, {"b": 1})
    assert len(caches.blocks("a", ((1, 2), (3,)))["a.key"]) == 2
    assert len(caches.blocks("b", ((1, 2), (3,)))["b.key"]) == 1


def test_one_tensor_for_all_layers_is_cut_into_them() -> None:
    both = torch.zeros(2, 8, 3)
    caches = PagedCaches.across_layers(both, ["a", "b"], None)
    assert caches.layers == ("a", "b")
    assert caches.pools("b")[0].data_ptr() == both[1].data_ptr()
    with pytest.raises(ValueError, match="2 layers, 1 have names"):
        PagedCaches.across_layers(both, ["a"], None)


def test_blocks_of_all_layers_stay_whole() -> None:
    shape = toy_shape(MODEL, layout=KVLayout.named("BLHNC"))
    caches = PagedCaches.across_layers(torch.zeros(8, 4, 4, 16, 16), ["a"], shape)
    assert caches.layers == ("layers",)


@pytest.mark.parametrize(
    ("cache", "words"),
    [
        (torch.zeros(3, 8, 16, 4, 8), "keys first, then values"),
        (torch.zeros(2, 8, 8, 8).transpose(1, 3), "contiguous"),
        (torch.zeros(2, 8, 16, 4, 16), "blocks of .* bytes, and by the engine's shape"),
    ],
)
def test_what_is_no_such_cache_is_refused(cache: torch.Tensor, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        PagedCaches({"a": cache}, toy_shape(MODEL))
    with pytest.raises(ValueError, match="no cache"):
        PagedCaches({}, None)


def test_caches_of_one_rank_are_on_one_device(gpu: FakeDevice) -> None:
    there = gpu.tensor(torch.zeros(8, 3))
    with pytest.raises(ValueError, match="several devices: cpu, cuda:0"):
        PagedCaches({"a": torch.zeros(8, 3), "b": there}, None)


async def test_blocks_of_the_host_are_copied_and_nothing_is_marked() -> None:
    cache = torch.arange(32.0).view(8, 4)
    moves = BlockMoves(PagedCaches({"a": cache}, None), CopyPool())
    assert (moves.is_on_gpu, moves.mark(), moves.now()) == (False, None, None)
    found = torch.zeros(2, 4)
    await moves.gather([moves.caches.blocks("a", ((5, 1),))["a.key"]], [found], None)
    assert torch.equal(found, cache[[5, 1]])
    await moves.scatter([found], [moves.caches.blocks("a", ((0, 7),))["a.key"]], None)
    assert torch.equal(cache[[0, 7]], found)


@pytest.mark.parametrize("is_on_gpu", [False, True])
async def test_nothing_is_written_where_a_block_is_there_twice(
    gpu: FakeDevice, is_on_gpu: bool
) -> None:
    cache = gpu.tensor(torch.zeros(8, 4)) if is_on_gpu else torch.zeros(8, 4)
    moves = moves_on(gpu, cache)
    blocks = moves.caches.blocks("a", ((7, 7),))["a.key"]
    with pytest.raises(ValueError, match="a block is there twice"):
        await moves.scatter([torch.ones(2, 4)], [blocks], None)
    assert not cache.cpu().any()
    moves.pool.close()


async def test_what_was_followed_is_what_counts() -> None:
    moves = BlockMoves(PagedCaches({"a": torch.zeros(2, 2)}, None), CopyPool())
    moves.follow(mark := object())
    assert moves.now() is mark
    moves.follow(GPUFailed("an illegal access"))  # what a thread had in its place
    with pytest.raises(GPUFailed, match="an illegal access"):
        moves.now()


def moves_on(gpu: FakeDevice, cache: torch.Tensor) -> BlockMoves:
    pool = CopyPool(lanes=lanes_of(gpu))
    return BlockMoves(PagedCaches({"a": cache}, None), pool)


async def test_what_is_on_the_gpu_is_fetched_and_nothing_else(gpu: FakeDevice) -> None:
    moves = moves_on(gpu, gpu.tensor(torch.zeros(8, 4)))
    there, here = gpu.tensor(torch.arange(5000.0)), torch.ones(2)
    found = await moves.fetch([here, there])
    assert found[0] is here and not found[1].is_cuda
    assert torch.equal(found[1], torch.arange(5000.0))
    moves.pool.close()


@pytest.mark.parametrize(
    ("device", "fits"), [("cuda:0", True), ("cuda:1", False), ("cpu", False)]
)
def test_blocks_go_straight_to_a_buffer_on_their_gpu(
    device: str, fits: bool, gpu: FakeDevice
) -> None:
    cache = gpu.tensor(torch.zeros(8, 2, 4))
    assert moves_on(gpu, cache).fit(device) is fits
    assert not moves_on(gpu, cache[:, 1]).fit(device)
    host = BlockMoves(PagedCaches({"a": torch.zeros(2, 2)}, None), CopyPool())
    assert not host.fit("cpu")


async def test_blocks_are_gathered_in_other_memory_of_their_gpu(
    gpu: FakeDevice,
) -> None:
    cache = torch.arange(32.0).view(8, 4)
    moves, there = moves_on(gpu, gpu.tensor(cache)), gpu.tensor(torch.zeros(2, 4))
    blocks = moves.caches.blocks("a", ((5, 1),))["a.key"]
    await moves.gather_there([blocks], [at_once(there, gpu.tensors).memory])
    assert torch.equal(there.cpu(), cache[[5, 1]])
    moves.pool.close()


async def test_what_takes_a_gpu_its_time_is_ready_once_it_is_opened(
    gpu: FakeDevice,
) -> None:
    moves = moves_on(gpu, gpu.tensor(torch.arange(32.0).view(8, 4)))
    await moves.open()
    count = len(gpu.process.owned)
    blocks = moves.caches.blocks("a", ((5, 1),))["a.key"]
    await moves.gather([blocks], [torch.zeros(2, 4)], None)
    assert len(gpu.process.owned) == count
    moves.pool.close()
    await BlockMoves(PagedCaches({"a": torch.zeros(2, 2)}, None), CopyPool()).open()


async def test_blocks_of_the_host_are_not_gathered_on_a_gpu() -> None:
    pool = CopyPool()
    moves = BlockMoves(PagedCaches({"a": torch.zeros(8, 3)}, None), pool)
    with pytest.raises(ValueError, match="on no GPU"):
        await moves.gather_there([], [])


async def test_a_gpu_is_made_ready_once_and_what_fails_is_for_a_transfer_to_say(
    monkeypatch: pytest.MonkeyPatch, gpu: FakeDevice
) -> None:
    async def fail(*args: object) -> None:
        raise GPUFailed("no kernels")

    none = moves_on(gpu, gpu.tensor(torch.zeros(0, 4)))
    await none.open()  # no block could be gathered
    moves = moves_on(gpu, gpu.tensor(torch.zeros(8, 4)))
    with monkeypatch.context() as patch:
        patch.setattr(BlockMoves, "gather", fail)
        await moves.open_if_possible()
    for _ in range(2):
        await moves.open_if_possible()
    assert gpu.process.cuda.launches == 3  # two to load, and one block
    for one in (none, moves):
        one.pool.close()


POOL = torch.arange(32.0).view(8, 4)
BLOCKS = {layer: {f"{layer}.key": KVBlocks(POOL, (5, 1))} for layer in "ab"}
NBYTES = 2 * 2 * 16


def moves_of() -> BlockMoves:
    return BlockMoves(PagedCaches({"a": POOL}, None), CopyPool())


async def test_copies_are_what_the_blocks_were() -> None:
    staging, pool = Staging(NBYTES), POOL.clone()
    blocks = {"a": {"a.key": KVBlocks(pool, (5, 1))}}
    copy = await staging.copy(blocks, moves_of())
    assert copy is not None
    pool.zero_()
    assert copy.tensor("a", "a.key").tolist() == POOL[[5, 1]].tolist()


async def test_what_does_not_fit_is_not_copied_until_something_is_dropped() -> None:
    staging, moves = Staging(NBYTES), moves_of()
    copy = await staging.copy(BLOCKS, moves)
    assert copy is not None and staging.used_bytes == NBYTES
    assert await staging.copy(BLOCKS, moves) is None
    copy.drop("a")
    copy.drop("a")
    assert staging.used_bytes == NBYTES // 2
    assert await staging.copy(BLOCKS, moves) is None
    copy.drop()
    assert staging.used_bytes == 0
    assert await staging.copy(BLOCKS, moves) is not None
    assert staging.copies == 2


async def test_megabytes_that_are_dropped_are_not_freed_on_the_loop() -> None:
    large, moves, freed_by = torch.zeros(4, 2**20), moves_of(), list[int]()
    copy = await Staging(2**30).copy({"a": {"a.key": KVBlocks(large, (3, 0))}}, moves)
    assert copy is not None
    weakref.finalize(
        copy.tensor("a", "a.key"), lambda: freed_by.append(threading.get_ident())
    )
    copy.drop()
    await until(lambda: bool(freed_by))
    assert freed_by != [threading.get_ident()]
    moves.pool.close()


class Stuck(BlockMoves):
    """Gathers until it is cancelled."""

    async def gather(
        self,
        sources: Sequence[KVBlocks],
        targets: Sequence[torch.Tensor],
        mark: Event | None,
    ) -> None:
        await asyncio.Event().wait()


async def test_a_cancelled_copy_takes_no_room() -> None:
    staging, stuck = Staging(NBYTES), Stuck(moves_of().caches, CopyPool())
    copying = asyncio.create_task(staging.copy(BLOCKS, stuck))
    await until_blocked(copying)
    assert staging.used_bytes == NBYTES
    copying.cancel()
    with pytest.raises(asyncio.CancelledError):
        await copying
    assert await staging.copy(BLOCKS, moves_of()) is not None
    assert staging.copies == 1


async def test_who_waits_for_room_is_told_of_what_is_dropped() -> None:
    staging = Staging(NBYTES)
    copy = await staging.copy(BLOCKS, moves_of())
    assert copy is not None
    before = staging.more_room
    copy.drop("a")
    assert before.is_set() and not staging.more_room.is_set()
