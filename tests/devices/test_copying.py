from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import AsyncIterator, Iterator

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

from asynckv.buffers.lookup import LookupBuffer
from asynckv.devices.arena import DeviceArena, place_of
from asynckv.devices.copying import EDGE_NBYTES, CopyPool
from asynckv.devices.cuda import DeviceMemory
from asynckv.devices.lanes import DeviceLanes
from asynckv.devices.tensors import KVOnGpu
from asynckv.errors import GPUFailed
from asynckv.protocol.wire import digest_of
from asynckv.tensors import copying
from asynckv.tensors.blocks import KVBlocks
from asynckv.tensors.views import bytes_of, spec_of
from asynckv.testing.blocked import until
from asynckv.testing.expectations import is_same
from asynckv.testing.lookup_checks.values import MIB, noise
from asynckv.types import TensorSpec
from harness.device_memory import (
    filled_region,
    open_device_arena,
    open_device_pool,
    region_in,
)
from harness.fake_devices import FakeDevice, fake_device
from harness.fake_gpus import FakeGpus, FakeProcess
from harness.fake_gpus.cuda import FakeCuda
from harness.fake_gpus.gates import Gate
from harness.fake_gpus.streams import Delay
from harness.fake_gpus.tensors import FakeTensors

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


def _random(*shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8)


def _spec(nbytes: int) -> TensorSpec:
    return TensorSpec((nbytes,), "uint8")


async def _until_quiet() -> None:
    await until(lambda: not any("asynckv-" in t.name for t in threading.enumerate()))


async def test_a_tensor_goes_from_one_gpu_to_another(
    gpu_pool: CopyPool, tensors: FakeTensors
) -> None:
    content, target = _random(5000), tensors.empty(_spec(5000), device=1)
    await gpu_pool.copy([tensors.on_gpu(content)], [target])
    assert torch.equal(target.cpu(), content)


async def test_what_is_to_be_written_on_a_gpu_is_contiguous(
    gpu_pool: CopyPool, tensors: FakeTensors, process: FakeProcess
) -> None:
    target = torch.empty(100, 40, dtype=torch.uint8)
    with pytest.raises(ValueError, match="in order"):
        await gpu_pool.copy([target], [tensors.on_gpu(_random(40, 100)).T])


async def test_few_bytes_of_a_gpu_are_no_work_for_the_loop(
    gpu_pool: CopyPool, tensors: FakeTensors
) -> None:
    gate = Gate()
    tensors.stream(0).add(gate)
    target = torch.zeros(8, dtype=torch.uint8)
    copying = asyncio.create_task(_copy(gpu_pool, tensors.on_gpu(_random(8)), target))
    await asyncio.sleep(0)
    assert not copying.done()
    gate.open()
    await copying


async def test_a_cancelled_copy_ends_when_no_gpu_is_at_the_callers_memory(
    gpu_pool: CopyPool, process: FakeProcess, tensors: FakeTensors
) -> None:
    source, target = _random(50_000), tensors.empty(_spec(50_000))
    copying = asyncio.create_task(_copy(gpu_pool, source, target))
    await until(lambda: bool((target.as_subclass(torch.Tensor) == source).any()))
    copying.cancel()
    with pytest.raises(asyncio.CancelledError):
        await copying
    assert all(allocation.users == 0 for allocation in process.space.allocations())


async def test_an_entry_goes_from_a_gpu_through_a_buffer_to_a_gpu(
    lanes: DeviceLanes, tensors: FakeTensors
) -> None:
    key, value = _random(3000), _random(10)
    into = tensors.empty(_spec(3000))
    async with LookupBuffer("1MiB") as buffer:
        buffer.pool.lanes = lanes
        await buffer.insert([1, 2], None, tensors.on_gpu(key), value, None)
        entry = await buffer.drop_select([1, 2], into={"key": into})
    assert entry.key is into and torch.equal(into.cpu(), key)
    assert isinstance(entry.value, torch.Tensor) and torch.equal(entry.value, value)
    await _until_quiet()


async def test_what_an_insert_reads_is_what_the_callers_stream_had_made(
    lanes: DeviceLanes, tensors: FakeTensors, process: FakeProcess
) -> None:
    gate = Gate()
    tensors.stream(0).add(gate)
    made = tensors.on_gpu(torch.zeros(2000, dtype=torch.uint8))
    async with LookupBuffer("1MiB") as buffer:
        buffer.pool.lanes = lanes
        inserting = asyncio.create_task(buffer.insert([1], None, made, None, None))
        await asyncio.sleep(0)
        made.as_subclass(torch.Tensor).fill_(7)
        gate.open()
        await inserting
        entry = await buffer.drop_select([1])
    assert isinstance(entry.key, torch.Tensor) and bool((entry.key == 7).all())
    await _until_quiet()


@settings(
    deadline=None,
    max_examples=25,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    seed=st.integers(0, 2**16),
    slot_nbytes=st.sampled_from([256, 512, 4096]),
    sizes=st.lists(st.integers(0, 4000), min_size=1, max_size=6),
    cancel_after=st.integers(0, 40),
)
async def test_no_interleaving_copies_wrong_bytes_or_keeps_a_slot(
    seed: int, slot_nbytes: int, sizes: list[int], cancel_after: int
) -> None:
    gpus = FakeGpus(seed=seed, max_delay=4)
    process = gpus.process()
    tensors = FakeTensors(process)
    lanes = DeviceLanes(
        *(lambda: process.cuda, lambda: tensors), slot_nbytes=slot_nbytes
    )
    pool = CopyPool(lanes=lanes)
    contents = [_random(nbytes) for nbytes in sizes]
    copies = [torch.zeros_like(content) for content in contents]
    copying = asyncio.create_task(
        pool.copy([tensors.on_gpu(content) for content in contents], copies)
    )
    for _ in range(cancel_after):
        await asyncio.sleep(0)
    copying.cancel()
    await asyncio.wait({copying})
    if not copying.cancelled():
        assert all(map(torch.equal, copies, contents))
    assert all(allocation.users == 0 for allocation in process.space.allocations())
    again = [torch.zeros_like(content) for content in contents]
    await pool.copy([tensors.on_gpu(content) for content in contents], again)
    assert all(map(torch.equal, again, contents))
    pool.close()
    await _until_quiet()
    gpus.close()
    assert gpus.faults == []


async def _copy(pool: CopyPool, source: torch.Tensor, target: torch.Tensor) -> None:
    await pool.copy([source], [target], digest=False)


def _stuck_pool(
    process: FakeProcess, tensors: FakeTensors, monkeypatch: pytest.MonkeyPatch
) -> tuple[threading.Event, CopyPool]:
    """Return a pool whose first call of CUDA returns when the event is set."""
    returns = threading.Event()

    def open_late() -> FakeCuda:
        returns.wait(10)
        return process.cuda

    monkeypatch.setattr(copying, "_LATE_S", 0.01)
    lanes = DeviceLanes(open_late, lambda: tensors, limit_s=0.05)
    return returns, CopyPool(lanes=lanes)


async def test_a_call_of_cuda_that_does_not_return_keeps_nobody_waiting(
    process: FakeProcess, tensors: FakeTensors, monkeypatch: pytest.MonkeyPatch
) -> None:
    returns, pool = _stuck_pool(process, tensors, monkeypatch)
    content = _random(3000)
    source, target = tensors.on_gpu(content), torch.zeros_like(content)
    with pytest.raises(GPUFailed, match="does not let its thread go"):
        await pool.copy([source], [target])
    # Threads of the host's are others, and no more of that GPU's are asked for.
    assert await pool.digest([_random(2**20)])
    returns.set()
    with pytest.raises(GPUFailed, match="earlier copy"):
        await pool.copy([source], [target])
    pool.close()
    await _until_quiet()


async def test_a_cancelled_copy_of_a_gpu_that_is_stuck_ends_too(
    process: FakeProcess, tensors: FakeTensors, monkeypatch: pytest.MonkeyPatch
) -> None:
    returns, pool = _stuck_pool(process, tensors, monkeypatch)
    content = _random(3000)
    source, target = tensors.on_gpu(content), torch.zeros_like(content)
    running = asyncio.create_task(pool.copy([source], [target]))
    await until(lambda: pool._threads > 0)
    running.cancel()
    await asyncio.wait({running})
    assert running.cancelled()
    returns.set()
    pool.close()
    await _until_quiet()


async def test_a_stream_that_takes_its_time_is_waited_for(
    process: FakeProcess, tensors: FakeTensors, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copying, "_LATE_S", 0.01)
    lanes = DeviceLanes(*(lambda: process.cuda, lambda: tensors), limit_s=0.05)
    pool, content, gate = CopyPool(lanes=lanes), _random(3000), Gate()
    made, target = tensors.on_gpu(content), torch.zeros_like(content)
    tensors.stream(0).add(gate)
    running = asyncio.create_task(pool.copy([made], [target], digest=False))
    await asyncio.wait({running}, timeout=0.3)
    assert not running.done()
    gate.open()
    await running
    assert torch.equal(target, content)
    pool.close()
    await _until_quiet()
