from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from asynckv.devices.tensors import DeviceTensors, gpu_of
from asynckv.tensors.views import bytes_of
from asynckv.types import TensorSpec
from harness.fake_gpus import FakeGpus, FakeProcess
from harness.fake_gpus.cuda import FakeCuda
from harness.fake_gpus.gates import Gate
from harness.fake_gpus.tensors import FakeTensors


def run_in_thread(call: Callable[[], object]) -> object:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call).result()


def relaxed(cuda: FakeCuda) -> None:
    cuda.use_device(0)
    cuda.malloc(8)


@pytest.fixture
def tensors(near: FakeProcess) -> FakeTensors:
    return FakeTensors(near)


def test_they_fit_the_seam(tensors: FakeTensors) -> None:
    seam: DeviceTensors = tensors
    assert seam is tensors


def test_a_tensor_says_which_gpu_it_is_on(tensors: FakeTensors) -> None:
    tensor = tensors.empty(TensorSpec((4,), "float32"), device=1)
    assert gpu_of(tensor) == 1
    assert gpu_of(tensor[1:]) is not None


def test_it_cannot_be_read_as_if_it_were_the_hosts(tensors: FakeTensors) -> None:
    with pytest.raises(ValueError, match="cuda:0"):
        bytes_of(tensors.on_gpu(torch.ones(4)))


def test_its_memory_is_where_the_gpu_finds_it(
    near: FakeProcess, tensors: FakeTensors
) -> None:
    tensor = tensors.on_gpu(torch.arange(8, dtype=torch.uint8))
    memory = tensors.memory_of(tensor[2:5])
    assert near.cuda.view(memory).tolist() == [2, 3, 4]


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "bool", "complex64"])
def test_every_dtype_is_seen_over_the_same_bytes(
    near: FakeProcess, tensors: FakeTensors, dtype: str
) -> None:
    spec = TensorSpec((2, 3), dtype)
    memory = near.cuda.malloc(64)
    tensor = tensors.tensor_over(memory, spec)
    found = tensors.memory_of(tensor)
    assert (found.address, found.nbytes) == (memory.address, spec.nbytes)


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
