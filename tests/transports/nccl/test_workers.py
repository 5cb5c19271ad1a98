from __future__ import annotations

import asyncio

import pytest

from asynckv.devices.names import Device
from asynckv.devices.tensors import Gpus
from asynckv.errors import ConfigError, GPUFailed
from asynckv.testing.blocked import until
from asynckv.testing.cancellation import CancelMode, Outcome, sweep_cancellation
from asynckv.transports.nccl.worker import WorkerUse, use_worker, worker_of
from harness.fake_devices import fake_device


def test_a_gpu_has_one_worker_however_many_use_it() -> None:
    with fake_device() as gpu:
        one, other = use_worker(gpu.device), use_worker(gpu.device)
        assert one.worker is other.worker
        one.end()
        one.end()
        assert other.worker.run(lambda: None)
        other.end()
        assert not other.worker.run(lambda: None)


def test_the_next_user_gets_another_one() -> None:
    with fake_device() as gpu:
        first = use_worker(gpu.device)
        first.end()
        second = use_worker(gpu.device)
        assert second.worker is not first.worker
        second.end()


def test_one_that_was_given_up_is_the_last() -> None:
    with fake_device() as gpu:
        use = use_worker(gpu.device)
        use.worker.give_up(GPUFailed("it is stuck"))
        use.end()
        with pytest.raises(GPUFailed, match="it is stuck"):
            use_worker(gpu.device)


async def test_what_is_no_nccl_is_refused() -> None:
    with fake_device() as gpu:
        gpus = Gpus(gpu.process.cuda, gpu.tensors, object)
        with pytest.raises(ConfigError, match="is no NCCL"):
            await worker_of(Device(0, lambda: gpus))


async def test_a_cancelled_call_uses_none() -> None:
    with fake_device() as gpu:
        held = use_worker(gpu.device)
        opening = asyncio.create_task(worker_of(gpu.device))
        await asyncio.sleep(0)
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening
        await asyncio.get_running_loop().run_in_executor(None, lambda: None)
        held.end()


async def test_one_that_comes_in_the_tick_of_a_cancellation_is_let_go() -> None:
    async def check(k: int, mode: CancelMode, outcome: Outcome[WorkerUse]) -> None:
        if outcome.value is not None:
            outcome.value.end()
        await until(lambda: held.worker.users == 1)

    with fake_device() as gpu:
        held = use_worker(gpu.device)
        await sweep_cancellation(
            lambda: worker_of(gpu.device), check, modes=("completion",)
        )
        held.end()
