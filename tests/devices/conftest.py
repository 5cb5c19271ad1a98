"""Pools that copy, processes with fake GPUs, and how their memory is staged."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Iterator

import pytest

from asynckv.devices.arena import DeviceArena
from asynckv.devices.copying import CopyPool
from asynckv.devices.lanes import DeviceLanes
from asynckv.testing.blocked import until
from harness.children import begin
from harness.device_memory import open_device_arena
from harness.fake_devices import FakeDevice
from harness.fake_gpus import FakeGpus, FakeProcess
from harness.fake_gpus.tensors import FakeTensors

CHUNK_NBYTES = 1024

__all__ = ("begin",)


@pytest.fixture
def process() -> Iterator[FakeProcess]:
    gpus = FakeGpus(2, seed=1, max_delay=3)
    process = gpus.process()
    yield process
    gpus.close()
    assert gpus.faults == []


@pytest.fixture
def tensors(process: FakeProcess) -> FakeTensors:
    return FakeTensors(process)


@pytest.fixture
def lanes(process: FakeProcess, tensors: FakeTensors) -> Iterator[DeviceLanes]:
    found = DeviceLanes(
        *(lambda: process.cuda, lambda: tensors), slot_nbytes=CHUNK_NBYTES, limit_s=5
    )
    yield found
    found.close()


@pytest.fixture
def arena(gpu: FakeDevice) -> Iterator[DeviceArena]:
    """One that has all of its memory of that GPU."""
    with open_device_arena(gpu) as arena:
        yield arena


@pytest.fixture
async def pool() -> AsyncIterator[CopyPool]:
    """One of the host."""
    pool = CopyPool()
    yield pool
    pool.close()


@pytest.fixture
async def gpu_pool(lanes: DeviceLanes) -> AsyncIterator[CopyPool]:
    """One of both, whose threads are gone at the end."""
    pool = CopyPool(lanes=lanes)
    yield pool
    pool.close()
    await until(lambda: not any("asynckv-" in t.name for t in threading.enumerate()))
