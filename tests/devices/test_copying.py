from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import AsyncIterator, Iterator

import pytest
import torch

from asynckv.devices.arena import DeviceArena, place_of
from asynckv.devices.copying import EDGE_NBYTES, CopyPool
from asynckv.devices.cuda import DeviceMemory
from asynckv.devices.tensors import KVOnGpu
from asynckv.protocol.wire import digest_of
from asynckv.tensors.blocks import KVBlocks
from asynckv.tensors.views import bytes_of, spec_of
from asynckv.testing.blocked import until
from asynckv.testing.expectations import is_same
from asynckv.testing.lookup_checks.values import MIB, noise
from harness.device_memory import (
    filled_region,
    open_device_arena,
    open_device_pool,
    region_in,
)
from harness.fake_devices import FakeDevice, fake_device
from harness.fake_gpus.gates import Gate
from harness.fake_gpus.streams import Delay

NBYTES = 9 * 2**20 + 3


@pytest.fixture
def gpu(request: pytest.FixtureRequest) -> Iterator[FakeDevice]:
    with fake_device(max_delay=getattr(request, "param", 2)) as gpu:
        yield gpu


@pytest.fixture
async def pool(gpu: FakeDevice) -> AsyncIterator[CopyPool]:
    with open_device_pool(gpu) as pool:
        yield pool


@pytest.fixture
def arena(gpu: FakeDevice) -> Iterator[DeviceArena]:
    with open_device_arena(gpu, 32 * MIB) as arena:
        yield arena


@pytest.mark.parametrize("way", ["in", "out", "within"])
async def test_bytes_and_digests_are_right_each_way(
    gpu: FakeDevice, pool: CopyPool, way: str
) -> None:
    source, target = noise(NBYTES), torch.zeros(NBYTES, dtype=torch.uint8)
    origin = source if way == "in" else gpu.tensor(source)
    landing = target if way == "out" else gpu.tensor(target)
    assert await pool.copy([origin], [landing]) == [digest_of(bytes_of(source))]
    assert is_same(landing, source)


async def test_a_digest_of_what_is_on_the_gpu_is_that_of_its_bytes(
    gpu: FakeDevice, pool: CopyPool
) -> None:
    source = noise(NBYTES)
    assert await pool.digest([gpu.tensor(source)]) == [digest_of(bytes_of(source))]


async def test_blocks_of_the_gpu_are_read_in_their_order(
    gpu: FakeDevice, pool: CopyPool
) -> None:
    cache = noise(8 * 1024).view(8, 1024)
    target = torch.zeros(3, 1024, dtype=torch.uint8)
    blocks = KVBlocks(gpu.tensor(cache), [5, 0, 6])
    await pool.copy([blocks], [target], digest=False)
    assert torch.equal(target, cache[[5, 0, 6]])


async def test_the_loop_does_not_look_at_one_block_after_the_other(
    gpu: FakeDevice, pool: CopyPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads, part = set(), DeviceMemory.part

    def noted(memory: DeviceMemory, start: int, stop: int) -> DeviceMemory:
        threads.add(threading.get_ident())
        return part(memory, start, stop)

    blocks = KVBlocks(gpu.tensor(noise(8 * 1024).view(8, 1024)), [5, 0, 6])
    monkeypatch.setattr(DeviceMemory, "part", noted)
    await pool.digest([blocks])
    assert threads and threading.get_ident() not in threads


async def test_what_was_caught_is_ready_when_the_callers_stream_was_then(
    gpu: FakeDevice, pool: CopyPool
) -> None:
    stream, made = gpu.tensors.stream(0), gpu.tensor(noise(64))
    late, found = gpu.tensor(torch.zeros(64, dtype=torch.uint8)), noise(64) * 0
    stream.add(Delay(50))
    to, source = (gpu.tensors.memory_of(tensor) for tensor in (late, made))
    gpu.process.cuda.copy(to.address, source.address, 64, stream)
    caught = pool.catch(late)
    assert isinstance(caught, KVOnGpu)
    await pool.copy([caught], [found])
    assert is_same(found, noise(64))


async def test_what_was_caught_is_waited_for_again_after_a_cancelled_copy(
    gpu: FakeDevice, pool: CopyPool
) -> None:
    stream, late = gpu.tensors.stream(0), gpu.tensor(noise(64) * 0)
    held = Delay(10**9)
    stream.add(held)
    made = gpu.tensors.memory_of(gpu.tensor(noise(64)))
    to = gpu.tensors.memory_of(late).address
    gpu.process.cuda.copy(to, made.address, 64, stream)
    caught, found = pool.catch(late), noise(64) * 0
    first = asyncio.create_task(pool.copy([caught], [found]))
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.wait({first})
    second = asyncio.create_task(pool.copy([caught], [found]))
    await until(lambda: pool._threads > 0)
    held._ticks = 0
    await second
    assert first.cancelled() and is_same(found, noise(64))


async def test_memory_of_the_host_is_copied_beside_that_of_the_gpu(
    gpu: FakeDevice, pool: CopyPool
) -> None:
    source, found = noise(NBYTES), [noise(NBYTES) * 0 for _ in range(2)]
    digests = await pool.copy([gpu.tensor(source), source], found)
    assert all(is_same(one, source) for one in found)
    assert digests == [digest_of(bytes_of(source))] * 2


async def test_other_sizes_are_refused(gpu: FakeDevice, pool: CopyPool) -> None:
    with pytest.raises(ValueError, match="8 bytes are not 16"):
        await pool.copy([gpu.tensor(noise(8))], [noise(16)])


def edges_of(tensor: torch.Tensor) -> bytes:
    """Return the digest of a tensor's first and last bytes."""
    view = bytes(bytes_of(tensor))
    return digest_of(view[:EDGE_NBYTES] + view[-EDGE_NBYTES:])


@pytest.mark.parametrize(
    ("gpu", "sizes"),
    [(2, [MIB, EDGE_NBYTES + 1, 10]), (0, [4099] * 513)],
    indirect=["gpu"],
)
async def test_edges_are_the_first_and_the_last_bytes_of_each_place(
    arena: DeviceArena, pool: CopyPool, sizes: list[int]
) -> None:
    whole = noise(sum(sizes))
    region = await filled_region(arena, pool, whole)
    place, starts = place_of(region, spec_of(whole)), [0, *itertools.accumulate(sizes)]
    assert isinstance(place, DeviceMemory)
    ends = [*itertools.pairwise(starts)]
    found = await pool.edges([place.part(*one) for one in ends])
    assert found == [edges_of(whole[start:stop]) for start, stop in ends]
    arena.free([region])


async def test_what_lands_has_edges_wherever_it_comes_from(
    gpu: FakeDevice, arena: DeviceArena, pool: CopyPool
) -> None:
    value, other = noise(NBYTES), noise(NBYTES, 2)
    first, second = await filled_region(arena, pool, value), region_in(arena, NBYTES)
    await pool.copy(
        [place_of(first, spec_of(value))], [place_of(second, spec_of(value))]
    )
    assert first.edges == second.edges == edges_of(value)
    await pool.copy([gpu.tensor(other)], [place_of(second, spec_of(other))])
    assert (first.edges, second.edges) == (edges_of(value), edges_of(other))
    arena.free([first, second])


async def test_edges_stay_those_of_the_first_time_that_they_are_read(
    gpu: FakeDevice, arena: DeviceArena, pool: CopyPool
) -> None:
    region, spec = region_in(arena, MIB), spec_of(noise(MIB))
    tensor, place = (
        region.tensor(spec).as_subclass(torch.Tensor),
        place_of(region, spec),
    )
    assert isinstance(place, DeviceMemory)
    tensor.copy_(noise(MIB))
    await pool.digest([place.part(0, MIB // 2)])
    assert not region.edges  # a piece has other ones
    await pool.digest([place])
    assert region.edges == edges_of(noise(MIB))
    tensor.copy_(noise(MIB, 2))  # by whoever should leave it alone
    await pool.digest([place])
    assert region.edges == edges_of(noise(MIB))
    del tensor
    arena.free([region])


async def test_what_the_callers_stream_still_reads_is_not_overwritten(
    gpu: FakeDevice, pool: CopyPool
) -> None:
    target, gate = gpu.tensor(noise(64) * 0), Gate()
    gpu.tensors.stream(0).add(gate)
    copying = asyncio.create_task(pool.copy([noise(64)], [target]))
    await until(lambda: copying.done() or pool._threads > 0)
    await asyncio.wait({copying}, timeout=0.05)
    assert not copying.done() and not target.cpu().any()
    gate.open()
    await copying
    assert is_same(target, noise(64))


async def test_elements_of_any_strides_are_copied_in_their_order(
    gpu: FakeDevice, pool: CopyPool
) -> None:
    value, target = noise(4096).view(64, 64), noise(4096) * 0
    caught = pool.catch(gpu.tensor(value).t())
    await pool.copy([caught], [target])
    assert is_same(target, value.t().reshape(-1))
    assert await pool.copy([gpu.tensor(value).t()], [target * 0]) == [
        digest_of(bytes_of(target))
    ]


async def test_what_nobody_digests_never_leaves_the_gpu(
    gpu: FakeDevice, pool: CopyPool
) -> None:
    source, target = gpu.tensor(noise(MIB)), gpu.tensor(noise(MIB) * 0)
    await pool.copy([source], [target], digest=False)
    assert is_same(target, noise(MIB))
    assert all(one.device >= 0 for one in gpu.process.space.allocations())
