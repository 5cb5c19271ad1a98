from __future__ import annotations

import asyncio

import pytest

from asynckv.errors import GPUFailed
from asynckv.testing.blocked import until, until_blocked
from asynckv.transports.nccl.connecting import Staging
from asynckv.transports.nccl.worker import DeviceWorker
from harness.fake_gpus import FakeGpus


async def test_it_is_allocated_and_freed_on_the_worker(worker: DeviceWorker) -> None:
    staging = Staging(worker)
    scratch = await staging.allocate()
    assert scratch.nbytes
    staging.free()
    staging.free()
    await until(lambda: staging.scratch is None)


async def test_no_worker_no_memory(gpus: FakeGpus, worker: DeviceWorker) -> None:
    worker.stop()
    with pytest.raises(GPUFailed, match="has stopped"):
        await Staging(worker).allocate()


async def test_memory_of_a_worker_that_was_given_up_is_kept(
    worker: DeviceWorker,
) -> None:
    staging = Staging(worker)
    await staging.allocate()
    worker.give_up(GPUFailed("stuck"))
    staging.free()
    assert staging in worker.kept and staging.scratch is not None


async def test_what_cannot_be_allocated_is_raised(worker: DeviceWorker) -> None:
    worker.run(lambda: setattr(worker.cuda, "malloc", None))
    with pytest.raises(TypeError):
        await Staging(worker).allocate()


async def test_a_cancelled_allocation_is_freed_all_the_same(
    gpus: FakeGpus, worker: DeviceWorker
) -> None:
    gate = asyncio.Event()
    worker.run(lambda: gpus.block(gate.is_set, "the test"))
    staging = Staging(worker)
    task = asyncio.create_task(staging.allocate())
    await until_blocked(task)
    task.cancel()
    await asyncio.wait({task})
    staging.free()
    gate.set()
    await until(lambda: staging.scratch is None)
