from __future__ import annotations

import pytest
import torch

from asynckv.devices.cuda import DeviceMemory
from asynckv.types import TensorSpec
from harness.fake_devices import fake_device, fake_device_of
from harness.fake_gpus import FakeGpus


def test_a_tensor_of_a_fake_device_is_on_its_gpu_and_comes_back() -> None:
    with fake_device() as gpu:
        made = gpu.tensor(torch.arange(8))
        assert made.is_cuda and torch.equal(made.cpu(), torch.arange(8))


def test_what_a_device_makes_for_the_application_is_on_the_gpu_it_names() -> None:
    gpus = FakeGpus(2)
    second = fake_device_of(gpus.process(), 1)
    assert second.device.empty(TensorSpec((4,), "uint8")).device.index == 1
    gpus.close()


def test_what_hardware_would_punish_fails_the_test() -> None:
    with (
        pytest.raises(AssertionError, match="while a copy was under way"),
        fake_device(max_delay=4) as gpu,
    ):
        cuda = gpu.process.cuda
        stream, pinned, memory = cuda.stream(), cuda.host_alloc(8), cuda.malloc(8)
        cuda.copy(memory.address, pinned.address, 8, stream)
        while not began(gpu.process.gpus, memory):
            gpu.process.gpus.progress()
        cuda.drop(memory)


def began(gpus: FakeGpus, memory: DeviceMemory) -> bool:
    """A copy of the only process has begun, and is not over."""
    (process,) = gpus._processes
    return bool(process.space.find(memory.address, memory.nbytes)[0].users)
