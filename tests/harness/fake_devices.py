"""A GPU that is not there, as buffers take it in ``device=``."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import threading
from collections.abc import Iterator
from typing import Final

import torch

from asynckv.devices.lanes import DeviceLanes
from asynckv.devices.names import Device
from asynckv.devices.tensors import Gpus
from asynckv.testing.expectations import expect
from asynckv.types import TensorSpec
from harness.fake_gpus import FakeGpus, FakeProcess
from harness.fake_gpus.tensors import FakeTensors

__all__ = (
    "FakeDevice",
    "calls_of_cuda",
    "fake_device",
    "fake_device_of",
    "faultless_gpus",
    "lanes_of",
)

_CHUNK_NBYTES: Final = 4096
"""Of a slot: blocks of a prompt take several."""


@dataclasses.dataclass(frozen=True)
class FakeDevice:
    """One GPU of a process: ``device`` is what buffers and peers take."""

    process: FakeProcess
    tensors: FakeTensors
    device: Device
    index: int = 0

    def tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy on the GPU, of the application's own."""
        return self.tensors.on_gpu(tensor, self.index)

    def lanes(self) -> DeviceLanes:
        """Return what copies tensors of the GPU for a pool in host memory."""
        return DeviceLanes(lambda: self.process.cuda, lambda: self.tensors)


def fake_device_of(process: FakeProcess, index: int = 0) -> FakeDevice:
    """Return a GPU of a fake process."""
    tensors = FakeTensors(process)
    gpus = Gpus(process.cuda, tensors, lambda: process.nccl)

    def empty(spec: TensorSpec) -> torch.Tensor:
        return tensors.empty(spec, index)

    return FakeDevice(process, tensors, Device(index, lambda: gpus, empty), index)


def lanes_of(gpu: FakeDevice | None) -> DeviceLanes | None:
    """Return what copies the tensors of a GPU, in small slots."""
    if gpu is None:
        return None
    return DeviceLanes(
        *(lambda: gpu.process.cuda, lambda: gpu.tensors), slot_nbytes=_CHUNK_NBYTES
    )


@contextlib.contextmanager
def faultless_gpus(
    count: int = 1, *, seed: int = 0, max_delay: int = 0
) -> Iterator[FakeGpus]:
    """Return GPUs; nothing may have been done to them that hardware punishes.

    :raises AssertionError: something was
    """
    gpus = FakeGpus(count, seed=seed, max_delay=max_delay)
    try:
        yield gpus
        expect(not gpus.faults, gpus.faults)
    finally:
        for _ in range(2):  # the first lets views go, the second what they were of
            gc.collect()
        gpus.close()


@contextlib.contextmanager
def fake_device(*, seed: int = 0, max_delay: int = 0) -> Iterator[FakeDevice]:
    """Return a GPU of its own, as :func:`faultless_gpus` does."""
    with faultless_gpus(seed=seed, max_delay=max_delay) as gpus:
        yield fake_device_of(gpus.process())


def calls_of_cuda() -> list[str]:
    """Return the names of threads that are in calls of CUDA."""
    names = [thread.name for thread in threading.enumerate()]
    return [name for name in names if name.startswith("asynckv-gpu-call")]
