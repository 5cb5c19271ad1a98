"""Pools that copy, processes with fake GPUs, and how their memory is staged."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any

import anyio
import pytest

from asynckv.tensors.device_arena import DeviceArena
from asynckv.tensors.device_copying import CopyPool
from asynckv.tensors.device_lanes import DeviceLanes
from harness.device_memory import open_device_arena
from harness.fake_devices import FakeDevice
from harness.fake_gpus import FakeGpus, FakeProcess
from harness.fake_gpus.tensors import FakeTensors

CHUNK_NBYTES = 1024

Cancel = Callable[[], Coroutine[Any, Any, None]]
Begin = Callable[[Coroutine[Any, Any, None]], tuple[asyncio.Task[None], Cancel]]


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


@pytest.fixture(params=["task", "scope"])
def begin(request: pytest.FixtureRequest) -> Begin:
    """Begin work in a task; return that, and what cancels it and waits for its end.

    It is cancelled itself, or the scope that the work is done in.
    """

    def begin(work: Coroutine[Any, Any, None]) -> tuple[asyncio.Task[None], Cancel]:
        async def run() -> None:
            with scope:
                await work

        async def cancel_task() -> None:
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

        async def cancel_scope() -> None:
            scope.cancel()
            await task
            assert scope.cancelled_caught

        scope, task = anyio.CancelScope(), asyncio.create_task(run())
        return task, cancel_task if request.param == "task" else cancel_scope

    return begin
