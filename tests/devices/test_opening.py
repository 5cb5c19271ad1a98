from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Iterator

import pytest
import torch

from asynckv.devices.names import Device
from asynckv.devices.opening import DeviceCalls, OpenDevice, open_device
from asynckv.devices.tensors import Gpus
from asynckv.errors import GPUFailed, GPUUnavailable
from asynckv.testing import until, until_blocked
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


class Answer:
    """What CUDA returns when it is allowed to."""


@pytest.fixture
def stuck() -> Iterator[threading.Event]:
    released = threading.Event()
    yield released
    released.set()


async def test_a_call_is_made_in_another_thread() -> None:
    found = await DeviceCalls().call(threading.current_thread)
    assert found is not threading.current_thread()


async def test_what_a_call_raises_is_raised() -> None:
    def refuse() -> None:
        raise GPUUnavailable("no driver")

    with pytest.raises(GPUUnavailable, match="no driver"):
        await DeviceCalls().call(refuse)


async def test_a_call_that_does_not_return_is_not_waited_for_any_longer(
    stuck: threading.Event,
) -> None:
    calls = DeviceCalls(limit_s=0.05)
    for _ in range(2):  # the second does not even get its turn
        with pytest.raises(GPUFailed, match=r"within 0.05 s.*nvidia-smi"):
            await calls.call(stuck.wait)


async def test_a_cancelled_call_waits_for_nothing(stuck: threading.Event) -> None:
    calling = asyncio.create_task(DeviceCalls().call(stuck.wait))
    await until_blocked(calling)
    calling.cancel()
    await asyncio.wait({calling})
    assert calling.cancelled() and not stuck.is_set()


async def test_the_next_call_waits_for_one_that_was_cancelled(
    stuck: threading.Event,
) -> None:
    calls = DeviceCalls()
    first = asyncio.create_task(calls.call(stuck.wait))
    await until_blocked(first)
    first.cancel()
    second = asyncio.create_task(calls.call(stuck.is_set))
    await until_blocked(second)
    stuck.set()
    assert await second


async def test_what_a_cancelled_call_returns_is_dropped(stuck: threading.Event) -> None:
    made: list[weakref.ref[Answer]] = []

    def work() -> Answer:
        stuck.wait()
        answer = Answer()
        made.append(weakref.ref(answer))
        return answer

    calls = DeviceCalls()
    calling = asyncio.create_task(calls.call(work))
    await until_blocked(calling)
    calling.cancel()
    await asyncio.wait({calling})
    stuck.set()
    await until(lambda: bool(made) and gc.collect() >= 0 and made[0]() is None)
