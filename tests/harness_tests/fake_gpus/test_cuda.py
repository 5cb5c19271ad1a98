"""What CUDA promises of memory, streams, events and handles, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy
import pytest
import torch

from asynckv.devices.tensors import gpu_of
from asynckv.errors import GPUFailed
from asynckv.tensors.views import bytes_of
from harness.fake_gpus import POISON, FakeGpus, FakeProcess
from harness.fake_gpus.cuda import FakeCuda
from harness.fake_gpus.gates import Gate
from harness.fake_gpus.tensors import FakeTensors
from harness.forks import ForkServer

IMPORTER = """
import sys
from harness.fake_gpus import FakeGpus
cuda = FakeGpus().process().cuda
memory = cuda.open_memory(bytes.fromhex(sys.argv[1]), 8)
assert cuda.view(memory).tobytes() == b"exported"
cuda.view(memory)[:] = list(b"imported")
"""


def nobody_pinned(cuda: FakeCuda) -> int:
    return int(numpy.zeros(8, numpy.uint8).ctypes.data)


def before_it(cuda: FakeCuda) -> int:
    return cuda.malloc(8).address - 1


def beyond_it(cuda: FakeCuda) -> int:
    return cuda.malloc(8).address + 1


def freed(cuda: FakeCuda) -> int:
    memory = cuda.malloc(8)
    cuda.free(memory)
    return memory.address


@pytest.mark.parametrize("address_of", [nobody_pinned, before_it, beyond_it, freed])
def test_what_is_nobodys_is_an_illegal_address(
    near: FakeProcess, address_of: Callable[[FakeCuda], int]
) -> None:
    memory, stream = near.cuda.malloc(8), near.cuda.stream()
    address = address_of(near.cuda)
    with pytest.raises(GPUFailed, match="illegal address"):
        near.cuda.copy(memory.address, address, 8, stream)


def test_what_is_freed_in_the_middle_of_a_copy_reads_as_poison() -> None:
    gpus = FakeGpus(max_delay=8, seed=1)
    cuda = gpus.process().cuda
    source, target, stream = cuda.malloc(100), cuda.malloc(100), cuda.stream()
    cuda.view(source)[:] = 7
    cuda.copy(target.address, source.address, 100, stream)
    while not (cuda.view(target) == 7).any():
        gpus.progress()
    cuda.free(source)
    stream.synchronize()
    assert set(cuda.view(target).tolist()) == {7, POISON}
    assert gpus.faults == ["memory was freed while a copy was under way"]


def test_an_event_fires_when_the_work_before_it_has_ended() -> None:
    gpus = FakeGpus(max_delay=5, seed=3)
    cuda = gpus.process().cuda
    memory, stream, event = cuda.malloc(8), cuda.stream(), cuda.event()
    assert event.query()  # it was never recorded
    cuda.copy(memory.address, memory.address, 8, stream)
    event.record(stream)
    looks = 0
    while not event.query():
        looks += 1
    assert looks > 0 and not stream.work


def test_a_stream_waits_for_an_event_of_another() -> None:
    gpus = FakeGpus(max_delay=3, seed=1)
    cuda = gpus.process().cuda
    first, second, event = cuda.stream(), cuda.stream(), cuda.event()
    one, two, three = (cuda.malloc(8) for _ in range(3))
    cuda.view(one)[:] = 9
    cuda.copy(two.address, one.address, 8, first)
    event.record(first)
    second.wait(event)
    cuda.copy(three.address, two.address, 8, second)
    second.synchronize()
    assert cuda.view(three).tolist() == [9] * 8


def test_work_that_fails_fails_all_behind_it(near: FakeProcess) -> None:
    cuda, gate = near.cuda, Gate()
    memory, stream, event = cuda.malloc(8), cuda.stream(), cuda.event()
    stream.add(gate)
    event.record(stream)
    assert not event.query()
    gate.fail(GPUFailed("broken", code=719))
    with pytest.raises(GPUFailed, match="broken"):
        event.query()
    with pytest.raises(GPUFailed, match="has failed"):
        cuda.copy(memory.address, memory.address, 8, stream)


def test_a_handle_opens_the_same_bytes_elsewhere_and_once_at_a_time(
    near: FakeProcess, far: FakeProcess
) -> None:
    memory = near.cuda.malloc(8)
    handle = near.cuda.export(memory)
    opened = far.cuda.open_memory(handle, 8)
    near.cuda.view(memory)[:] = 5
    assert far.cuda.view(opened).tolist() == [5] * 8
    with pytest.raises(GPUFailed, match="open here already"):
        far.cuda.open_memory(handle, 8)
    far.cuda.close_memory(opened)
    far.cuda.open_memory(handle, 8)


def test_a_handle_is_of_a_whole_allocation_and_for_other_processes(
    near: FakeProcess,
) -> None:
    memory = near.cuda.malloc(8)
    with pytest.raises(GPUFailed, match="an allocation"):
        near.cuda.export(memory.part(4, 8))
    with pytest.raises(GPUFailed, match="what it has exported"):
        near.cuda.open_memory(near.cuda.export(memory), 8)


@pytest.mark.parametrize("is_owner", [True, False])
def test_memory_that_is_read_here_is_not_closed(is_owner: bool) -> None:
    gpus = FakeGpus(max_delay=1000, seed=1)
    near, far = gpus.process(), gpus.process()
    memory = near.cuda.malloc(8)
    opened = far.cuda.open_memory(near.cuda.export(memory), 8)
    reader, place = (near, memory) if is_owner else (far, opened)
    target, stream = reader.cuda.malloc(8), reader.cuda.stream()
    reader.cuda.copy(target.address, place.address, 8, stream)
    while not reader.space.uses(reader.space.find(place.address, 8)[0]):
        gpus.progress()
    far.cuda.close_memory(opened)
    assert bool(gpus.faults) is not is_owner
    gpus.close()


def test_what_a_dead_process_exported_is_gone(
    gpus: FakeGpus, near: FakeProcess, far: FakeProcess
) -> None:
    handle = near.cuda.export(near.cuda.malloc(8))
    opened, target = far.cuda.open_memory(handle, 8), far.cuda.malloc(8)
    near.end()
    with pytest.raises(GPUFailed, match="illegal address"):
        far.cuda.copy(target.address, opened.address, 8, far.cuda.stream())
    with pytest.raises(GPUFailed, match="is gone"):
        gpus.process().cuda.open_memory(handle, 8)


async def test_a_real_process_opens_what_was_exported_while_its_owner_lives(
    near: FakeProcess, forks: ForkServer
) -> None:
    memory = near.cuda.malloc(8)
    near.cuda.view(memory)[:] = list(b"exported")
    handle = near.cuda.export(memory)
    async with forks.running(IMPORTER, handle.hex()) as importer:
        assert await importer.wait() == 0
    assert near.cuda.view(memory).tobytes() == b"imported"
    of_the_dead = importer.pid.to_bytes(8, "little") + handle[8:]
    with pytest.raises(GPUFailed, match="is gone"):
        near.cuda.open_memory(of_the_dead, 8)


def run_in_thread(call: Callable[[], object]) -> object:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call).result()


def relaxed(cuda: FakeCuda) -> None:
    cuda.use_device(0)
    cuda.malloc(8)


@pytest.fixture
def tensors(near: FakeProcess) -> FakeTensors:
    return FakeTensors(near)


def test_a_tensor_is_on_its_gpu_and_not_the_hosts(
    near: FakeProcess, tensors: FakeTensors
) -> None:
    tensor = tensors.on_gpu(torch.arange(8, dtype=torch.uint8), 1)
    assert gpu_of(tensor) == gpu_of(tensor[1:]) == 1
    memory = tensors.memory_of(tensor[2:5])
    assert near.cuda.view(memory).tolist() == [2, 3, 4]
    with pytest.raises(ValueError, match="cuda:1"):
        bytes_of(tensor)


def test_memory_is_ready_when_the_callers_stream_is(
    near: FakeProcess, tensors: FakeTensors
) -> None:
    gate = Gate()
    tensors.stream(0).add(gate)
    memory = tensors.memory_of(tensors.on_gpu(torch.ones(4)))
    assert memory.ready is not None and not memory.ready.query()
    gate.open()
    assert memory.ready.query()


def test_no_stream_of_cuda_waits_for_a_mark_of_torchs(
    near: FakeProcess, tensors: FakeTensors
) -> None:
    mark = tensors.mark(tensors.stream_of(0))
    with pytest.raises(TypeError, match="not an event"):
        near.cuda.stream().wait(mark)
    with pytest.raises(TypeError, match="not a stream"):
        near.cuda.event().record(tensors.stream(0))


def test_a_stream_is_the_threads_that_uses_it(tensors: FakeTensors) -> None:
    side = tensors.new_stream(0)
    with tensors.use_stream(side):
        assert tensors.stream_of(0) is side
        assert tensors.stream_of(1) is not side
        elsewhere = run_in_thread(lambda: tensors.stream_of(0))
    assert elsewhere is tensors.stream_of(0) is not side


def test_a_thread_that_would_break_a_capture_is_written_down(
    gpus: FakeGpus, near: FakeProcess
) -> None:
    run_in_thread(lambda: near.cuda.malloc(8))
    assert "break the engine's capture" in gpus.faults.pop()
    run_in_thread(lambda: relaxed(near.cuda))
    assert not gpus.faults
