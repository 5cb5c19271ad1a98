from __future__ import annotations

import numpy
import pytest

from asynckv.devices.cuda import CudaApi
from asynckv.errors import GPUFailed
from asynckv.types import TensorSpec
from harness.fake_gpus import POISON, FakeGpus, FakeProcess
from harness.fake_gpus.tensors import FakeTensors


def test_it_fits_the_seam(near: FakeProcess) -> None:
    cuda: CudaApi = near.cuda
    assert cuda.device_count() == 2
    assert cuda.uuid(0) != cuda.uuid(1)


def test_bytes_go_through_pinned_memory_to_a_gpu_and_back(near: FakeProcess) -> None:
    cuda = near.cuda
    there, host, stream = cuda.malloc(5), cuda.host_alloc(10), cuda.stream()
    host.view[:5] = b"hello"
    cuda.copy(there.address, host.address, 5, stream)
    cuda.copy(host.address + 5, there.address, 5, stream)
    stream.synchronize()
    assert bytes(host.view) == b"hellohello"


def test_memory_that_nobody_pinned_is_no_address(near: FakeProcess) -> None:
    plain = numpy.zeros(8, numpy.uint8)
    memory, stream = near.cuda.malloc(8), near.cuda.stream()
    with pytest.raises(GPUFailed, match="illegal address"):
        near.cuda.copy(memory.address, int(plain.ctypes.data), 8, stream)


def test_nothing_beyond_an_allocation_is_copied(near: FakeProcess) -> None:
    memory, stream = near.cuda.malloc(8), near.cuda.stream()
    with pytest.raises(GPUFailed, match="illegal address"):
        near.cuda.copy(memory.address, memory.address + 1, 8, stream)


def test_rows_are_gathered_by_their_ids(near: FakeProcess) -> None:
    tensors, stream = FakeTensors(near), near.cuda.stream()
    pool, packed, ids = (near.cuda.malloc(16) for _ in range(3))
    near.cuda.view(pool)[:] = range(16)
    near.cuda.view(ids)[:] = numpy.array([3, 0]).view(numpy.uint8)
    table = tensors.tensor_over(pool, TensorSpec((4, 4), "uint8"))
    tensors.move_rows(table, ids, packed.part(0, 8), stream, is_gathered=True)
    stream.synchronize()
    found = near.cuda.view(packed)[:8].tolist()
    assert found == [12, 13, 14, 15, 0, 1, 2, 3] and near.cuda.launches == 1


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


def test_what_was_freed_is_no_address(near: FakeProcess) -> None:
    memory, stream = near.cuda.malloc(8), near.cuda.stream()
    near.cuda.free(memory)
    with pytest.raises(GPUFailed, match="illegal address"):
        near.cuda.copy(memory.address, memory.address, 8, stream)


def test_a_handle_opens_the_same_bytes_elsewhere(
    near: FakeProcess, far: FakeProcess
) -> None:
    memory = near.cuda.malloc(8)
    opened = far.cuda.open_memory(near.cuda.export(memory), 8)
    near.cuda.view(memory)[:] = 5
    assert far.cuda.view(opened).tolist() == [5] * 8


def test_a_handle_is_not_opened_where_it_was_made(near: FakeProcess) -> None:
    handle = near.cuda.export(near.cuda.malloc(8))
    with pytest.raises(GPUFailed, match="what it has exported"):
        near.cuda.open_memory(handle, 8)


def test_a_handle_is_opened_once_at_a_time(near: FakeProcess, far: FakeProcess) -> None:
    handle = near.cuda.export(near.cuda.malloc(8))
    opened = far.cuda.open_memory(handle, 8)
    with pytest.raises(GPUFailed, match="open here already"):
        far.cuda.open_memory(handle, 8)
    far.cuda.close_memory(opened)
    far.cuda.open_memory(handle, 8)


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


def test_only_the_beginning_of_an_allocation_has_a_handle(near: FakeProcess) -> None:
    with pytest.raises(GPUFailed, match="an allocation"):
        near.cuda.export(near.cuda.malloc(8).part(4, 8))


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
