from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

from asynckv.buffers.lookup import LookupBuffer
from asynckv.devices.copying import CopyPool
from asynckv.devices.lanes import DeviceLanes
from asynckv.errors import GPUFailed
from asynckv.protocol.wire import digest_of
from asynckv.tensors import copying
from asynckv.testing.blocked import until
from asynckv.testing.pairs import open_pipe_pair
from asynckv.types import TensorSpec
from harness.fake_gpus import FakeGpus, FakeProcess
from harness.fake_gpus.cuda import FakeCuda
from harness.fake_gpus.gates import Gate
from harness.fake_gpus.tensors import FakeTensors


def _random(*shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8)


def _spec(nbytes: int) -> TensorSpec:
    return TensorSpec((nbytes,), "uint8")


@pytest.fixture
async def pool(lanes: DeviceLanes) -> AsyncIterator[CopyPool]:
    pool = CopyPool(lanes=lanes)
    yield pool
    pool.close()
    await _until_quiet()


async def _until_quiet() -> None:
    await until(lambda: not any("asynckv-" in t.name for t in threading.enumerate()))


async def test_a_tensor_of_a_gpu_comes_to_the_host_with_its_digest(
    pool: CopyPool, tensors: FakeTensors
) -> None:
    content = _random(5, 1000)
    target = torch.empty_like(content)
    (digest,) = await pool.copy([tensors.on_gpu(content)], [target])
    assert torch.equal(target, content)
    assert digest == digest_of(content.numpy().reshape(-1).data)


async def test_a_digest_alone_is_that_of_all_bytes_on_the_gpu(
    pool: CopyPool, tensors: FakeTensors
) -> None:
    content = _random(5000)
    assert await pool.digest([tensors.on_gpu(content)]) == [
        digest_of(content.numpy().data)
    ]


async def test_a_tensor_of_the_host_goes_to_a_gpu(
    pool: CopyPool, tensors: FakeTensors
) -> None:
    content, target = _random(5000), tensors.empty(_spec(5000))
    await pool.copy([content], [target], digest=False)
    assert torch.equal(target.cpu(), content)


async def test_a_tensor_goes_from_one_gpu_to_another(
    pool: CopyPool, tensors: FakeTensors
) -> None:
    content, target = _random(5000), tensors.empty(_spec(5000), device=1)
    await pool.copy([tensors.on_gpu(content)], [target])
    assert torch.equal(target.cpu(), content)


async def test_what_is_to_be_written_on_a_gpu_is_contiguous(
    pool: CopyPool, tensors: FakeTensors, process: FakeProcess
) -> None:
    target = torch.empty(100, 40, dtype=torch.uint8)
    with pytest.raises(ValueError, match="in order"):
        await pool.copy([target], [tensors.on_gpu(_random(40, 100)).T])


async def test_few_bytes_of_a_gpu_are_no_work_for_the_loop(
    pool: CopyPool, tensors: FakeTensors
) -> None:
    gate = Gate()
    tensors.stream(0).add(gate)
    target = torch.zeros(8, dtype=torch.uint8)
    copying = asyncio.create_task(_copy(pool, tensors.on_gpu(_random(8)), target))
    await asyncio.sleep(0)
    assert not copying.done()
    gate.open()
    await copying


async def test_a_cancelled_copy_ends_when_no_gpu_is_at_the_callers_memory(
    pool: CopyPool, process: FakeProcess, tensors: FakeTensors
) -> None:
    source, target = _random(50_000), tensors.empty(_spec(50_000))
    copying = asyncio.create_task(_copy(pool, source, target))
    await until(lambda: bool((target.as_subclass(torch.Tensor) == source).any()))
    copying.cancel()
    with pytest.raises(asyncio.CancelledError):
        await copying
    assert all(allocation.users == 0 for allocation in process.space.allocations())


async def test_an_error_of_cuda_ends_a_copy_and_names_its_code(
    pool: CopyPool, tensors: FakeTensors
) -> None:
    gate = Gate()
    tensors.stream(0).add(gate)
    gate.fail(GPUFailed("an illegal access", code=700))
    with pytest.raises(GPUFailed, match="illegal access") as caught:
        await _copy(pool, tensors.on_gpu(_random(100)), _random(100))
    assert caught.value.code == 700


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


async def test_a_pipe_takes_tensors_of_a_gpu_and_fills_them(
    process: FakeProcess, tensors: FakeTensors
) -> None:
    content, into = _random(200_000), tensors.empty(_spec(200_000))
    async with open_pipe_pair() as (near, far):
        for pipe in (near, far):
            pipe._pool.lanes = DeviceLanes(lambda: process.cuda, lambda: tensors)
        await near.send_tensor(tensors.on_gpu(content))
        assert await far.recv_tensor(into=into) is into
    assert torch.equal(into.cpu(), content)
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
