from __future__ import annotations

import threading

import pytest
import torch

from asynckv.devices.names import Device
from asynckv.devices.opening import OpenDevice, open_device
from asynckv.devices.tensors import Gpus
from asynckv.errors import GPUFailed, GPUUnavailable
from asynckv.testing.expectations import is_same, noise
from asynckv.types import TensorSpec
from harness.fake_devices import fake_device

pytestmark = pytest.mark.both_loops

SPEC = TensorSpec((64,), "uint8")


async def test_the_cpu_is_not_opened() -> None:
    assert await open_device(None) is None


async def test_a_gpu_is_opened_in_a_thread() -> None:
    with fake_device() as gpu:
        threads: list[threading.Thread] = []

        def open_gpus() -> Gpus:
            threads.append(threading.current_thread())
            return gpu.device.opened()

        opened = await open_device(Device(0, open_gpus, gpu.device.ordinary))
        assert opened is not None and opened.gpus.tensors is gpu.tensors
        assert threads != [threading.current_thread()]


async def test_what_is_missing_is_told() -> None:
    def open_gpus() -> Gpus:
        raise GPUUnavailable("CuPy is not installed")

    with pytest.raises(GPUUnavailable, match="CuPy is not installed"):
        await open_device(Device(0, open_gpus))


async def test_a_gpu_that_is_not_there_is_told() -> None:
    with fake_device() as gpu:
        device = Device(3, gpu.device.open, gpu.device.ordinary)
        with pytest.raises(GPUUnavailable, match="no cuda:3.*sees 1 GPUs"):
            await open_device(device)


async def test_a_torch_without_cuda_is_told() -> None:
    def refuse(spec: TensorSpec) -> torch.Tensor:
        raise AssertionError("Torch not compiled with CUDA enabled")

    with fake_device() as gpu:
        device = Device(0, gpu.device.open, refuse)
        with pytest.raises(GPUUnavailable, match="not compiled with CUDA"):
            await open_device(device)


async def test_a_tensor_is_made_in_any_thread_and_copied_to() -> None:
    with fake_device() as gpu:
        opened = OpenDevice(gpu.device, gpu.device.opened())
        made, pool = opened.maker(SPEC)(), opened.make_pool()
        await pool.copy([noise(64, 1)], [made])
        assert made.tensor.is_cuda and is_same(made.tensor, noise(64, 1))
        pool.close()


def test_a_device_that_makes_tensors_of_the_host_is_refused() -> None:
    with fake_device() as gpu:
        device = Device(0, gpu.device.open, lambda spec: torch.zeros(spec.shape))
        with pytest.raises(TypeError, match="of no GPU"):
            OpenDevice(device, device.opened()).maker(SPEC)()


def test_memory_that_there_is_none_of_is_an_error_of_the_gpus() -> None:
    def refuse(spec: TensorSpec) -> torch.Tensor:
        raise RuntimeError("CUDA out of memory")

    with fake_device() as gpu:
        device = Device(0, gpu.device.open, refuse)
        with pytest.raises(GPUFailed, match="has no 64 bytes: CUDA out of memory"):
            OpenDevice(device, gpu.device.opened()).maker(SPEC)()
