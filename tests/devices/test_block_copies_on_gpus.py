from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator

import pytest
import torch

from asynckv.devices.block_copies import BlockCopier, CopyDirection
from asynckv.devices.copying import CopyPool
from asynckv.devices.lanes import DeviceLanes
from asynckv.testing.blocked import until
from harness.fake_gpus import FakeProcess
from harness.fake_gpus.gates import Gate
from harness.fake_gpus.tensors import FakeTensors

_LAYERS = 3


@pytest.fixture
async def pool(lanes: DeviceLanes) -> AsyncIterator[CopyPool]:
    pool = CopyPool(lanes=lanes)
    yield pool
    pool.close()
    await until(lambda: not any("asynckv-" in t.name for t in threading.enumerate()))


def _cache(shape: tuple[int, ...]) -> dict[str, torch.Tensor]:
    return {
        f"layers.{number}": torch.randint(0, 256, shape, dtype=torch.uint8)
        for number in range(_LAYERS)
    }


def _on_gpu(
    cache: dict[str, torch.Tensor], tensors: FakeTensors
) -> dict[str, torch.Tensor]:
    return {layer: tensors.on_gpu(tensor) for layer, tensor in cache.items()}


@pytest.mark.parametrize("direction", ["d2h", "h2d", "d2d"])
@pytest.mark.parametrize("block_dim", [0, 1])
async def test_blocks_of_all_layers_go_where_torch_would_put_them(
    pool: CopyPool, tensors: FakeTensors, direction: CopyDirection, block_dim: int
) -> None:
    shape = (20, 4, 16) if not block_dim else (2, 20, 4, 8)
    one, other = _cache(shape), _cache(shape)
    source = _on_gpu(one, tensors) if direction[0] == "d" else one
    target = _on_gpu(other, tensors) if direction[2] == "d" else other
    ids, places = [17, 3, 4, 11, 0], [2, 9, 10, 1, 19]
    copier = BlockCopier(pool, block_dim=block_dim)
    expected = {layer: cache.clone() for layer, cache in other.items()}
    for layer, cache in expected.items():
        moved = one[layer].index_select(block_dim, torch.tensor(ids))
        cache.index_copy_(block_dim, torch.tensor(places), moved)
    await copier.copy(source, target, ids, places, direction)
    for layer, cache in target.items():
        assert torch.equal(cache.cpu(), expected[layer])


async def test_the_direction_is_what_the_devices_say(
    pool: CopyPool, tensors: FakeTensors
) -> None:
    source, target = _on_gpu(_cache((4, 64)), tensors), _cache((4, 64))
    with pytest.raises(ValueError, match="the devices say 'd2h'"):
        await BlockCopier(pool).copy(source, target, [0], [0], "h2d")


class Fill:
    """Work of a stream that computes a cache of the GPU, as the engine does."""

    def __init__(self, cache: dict[str, torch.Tensor], value: int) -> None:
        self._cache, self._value = cache, value

    def run(self) -> bool:
        for layer in self._cache.values():
            layer.as_subclass(torch.Tensor).fill_(self._value)
        return True


@pytest.mark.parametrize("direction", ["d2h", "h2d"])
async def test_what_the_callers_stream_was_given_before_is_done_first(
    pool: CopyPool,
    tensors: FakeTensors,
    process: FakeProcess,
    direction: CopyDirection,
) -> None:
    on_gpu, on_host = _on_gpu(_cache((8, 64)), tensors), _cache((8, 64))
    is_out, copier, gate = direction == "d2h", BlockCopier(pool), Gate()
    source, target = (on_gpu, on_host) if is_out else (on_host, on_gpu)
    expected = [7 if is_out else int(layer[3, 0]) for layer in source.values()]
    engines = tensors.new_stream(0)  # the threads of the pool have another one
    engines.add(gate)
    engines.add(Fill(on_gpu, 7))
    with tensors.use_stream(engines):
        copying = asyncio.create_task(copier.copy(source, target, [3], [5], direction))
        await until(lambda: copying.done() or "an event to fire" in process.gpus.kept)
    assert not copying.done()
    gate.open()
    await copying
    assert [int(layer.cpu()[5, 0]) for layer in target.values()] == expected
