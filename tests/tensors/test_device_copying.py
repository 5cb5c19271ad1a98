from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator

import pytest
import torch

from asynckv.protocol.digests import digest_of
from asynckv.tensors.blocks import KVBlocks
from asynckv.tensors.cuda import DeviceMemory
from asynckv.tensors.device_copying import DeviceCopyPool
from asynckv.tensors.on_gpu import KVOnGpu
from asynckv.tensors.views import bytes_of
from asynckv.testing.blocked import until
from asynckv.testing.expectations import is_same
from asynckv.testing.lookup_checks.values import noise
from harness.device_memory import open_device_pool
from harness.fake_devices import FakeDevice, fake_device
from harness.fake_gpus.streams import Delay

NBYTES = 9 * 2**20 + 3


@pytest.fixture
def gpu() -> Iterator[FakeDevice]:
    with fake_device(max_delay=2) as gpu:
        yield gpu


@pytest.fixture
async def pool(gpu: FakeDevice) -> AsyncIterator[DeviceCopyPool]:
    with open_device_pool(gpu) as pool:
        yield pool


@pytest.mark.parametrize("way", ["in", "out", "within"])
async def test_bytes_and_digests_are_right_each_way(
    gpu: FakeDevice, pool: DeviceCopyPool, way: str
) -> None:
    source, target = noise(NBYTES), torch.zeros(NBYTES, dtype=torch.uint8)
    origin = source if way == "in" else gpu.tensor(source)
    landing = target if way == "out" else gpu.tensor(target)
    assert await pool.copy([origin], [landing]) == [digest_of(bytes_of(source))]
    assert is_same(landing, source)


async def test_a_digest_of_what_is_on_the_gpu_is_that_of_its_bytes(
    gpu: FakeDevice, pool: DeviceCopyPool
) -> None:
    source = noise(NBYTES)
    assert await pool.digest([gpu.tensor(source)]) == [digest_of(bytes_of(source))]


async def test_blocks_of_the_gpu_are_read_in_their_order(
    gpu: FakeDevice, pool: DeviceCopyPool
) -> None:
    cache = noise(8 * 1024).view(8, 1024)
    target = torch.zeros(3, 1024, dtype=torch.uint8)
    blocks = KVBlocks(gpu.tensor(cache), [5, 0, 6])
    await pool.copy([blocks], [target], digest=False)
    assert torch.equal(target, cache[[5, 0, 6]])


async def test_the_loop_does_not_look_at_one_block_after_the_other(
    gpu: FakeDevice, pool: DeviceCopyPool, monkeypatch: pytest.MonkeyPatch
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
    gpu: FakeDevice, pool: DeviceCopyPool
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
    gpu: FakeDevice, pool: DeviceCopyPool
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
    gpu: FakeDevice, pool: DeviceCopyPool
) -> None:
    source, found = noise(NBYTES), [noise(NBYTES) * 0 for _ in range(2)]
    digests = await pool.copy([gpu.tensor(source), source], found)
    assert all(is_same(one, source) for one in found)
    assert digests == [digest_of(bytes_of(source))] * 2


async def test_other_sizes_are_refused(gpu: FakeDevice, pool: DeviceCopyPool) -> None:
    with pytest.raises(ValueError, match="8 bytes are not 16"):
        await pool.copy([gpu.tensor(noise(8))], [noise(16)])
