from __future__ import annotations

import asyncio
import contextlib
import random
import threading
from collections.abc import AsyncIterator, Iterator
from functools import partial

import pytest
import torch

from asynckv.errors import GPUFailed, PeerLost
from asynckv.pipes.opening import listen_pipe, open_pipe
from asynckv.pipes.pipe import Pipe
from asynckv.testing import (
    CancelMode,
    Outcome,
    sweep_cancellation,
    until,
    until_blocked,
)
from asynckv.testing.expectations import CANCEL_MODES, is_same, noise
from asynckv.testing.pairs import open_group, open_pipe_pair
from asynckv.testing.pipe_checks import (
    LARGE,
    PIPE_CHECKS,
    SIZES,
    PipeCheck,
    check_pipe,
    send_many,
)
from asynckv.types import TensorSpec
from harness.fake_devices import FakeDevice, fake_device, fake_device_of
from harness.fake_gpus import FakeGpus
from harness.fake_gpus.gates import Gate


@pytest.fixture
def gpu() -> Iterator[FakeDevice]:
    with fake_device(max_delay=2) as gpu:
        yield gpu


@contextlib.asynccontextmanager
async def on_gpu(gpu: FakeDevice) -> AsyncIterator[tuple[Pipe, Pipe]]:
    async with open_pipe_pair("unix", device=gpu.device) as pair:
        yield pair


@pytest.mark.parametrize("check", PIPE_CHECKS, ids=lambda check: check.__name__)
async def test_a_pipe_on_a_gpu_keeps(check: PipeCheck, gpu: FakeDevice) -> None:
    async with on_gpu(gpu) as (near, far):
        await check(near, far)


@pytest.mark.chaos
async def test_all_checks_run_as_one_on_a_gpu(gpu: FakeDevice) -> None:
    await check_pipe(partial(on_gpu, gpu))


@pytest.mark.parametrize("nbytes", [0, *SIZES])
async def test_what_the_host_sends_is_received_on_the_gpu(
    gpu: FakeDevice, nbytes: int
) -> None:
    async with open_pipe_pair(device=gpu.device) as (near, far):
        await near.send_tensor(noise(nbytes, 1))
        found = await far.recv_tensor()
        assert found is not None and found.is_cuda and is_same(found, noise(nbytes, 1))


async def test_what_a_gpu_sends_is_received_in_host_memory(gpu: FakeDevice) -> None:
    async with open_pipe_pair("mem") as (plain, end), on_gpu(gpu) as (near, _):
        end._pool.lanes = near._pool.lanes
        await end.send_tensor(gpu.tensor(noise(LARGE, 1)))
        found = await plain.recv_tensor()
        assert found is not None and not found.is_cuda
        assert is_same(found, noise(LARGE, 1))


async def test_each_side_receives_on_its_own_gpu_whatever_the_senders() -> None:
    gpus = FakeGpus(2)
    process = gpus.process()
    first, second = fake_device_of(process), fake_device_of(process, 1)
    async with (
        listen_pipe("mem://", device=second.device) as listener,
        open_pipe(listener.url, device=first.device) as near,
        await listener.accept() as far,
    ):
        await near.send_tensor(first.tensor(noise(LARGE, 1)))
        there = await far.recv_tensor()
        assert there is not None and there.device == torch.device("cuda", 1)
        await far.send_tensor(there)
        back = await near.recv_tensor()
        assert back is not None and back.device == torch.device("cuda", 0)
        assert is_same(back, noise(LARGE, 1))
    gpus.close()
    assert not gpus.faults


async def test_into_is_where_the_caller_says(gpu: FakeDevice) -> None:
    async with open_pipe_pair("mem", device=gpu.device) as (near, far):
        for into in (torch.zeros(LARGE).byte(), gpu.tensor(torch.zeros(LARGE).byte())):
            await near.send_tensor(noise(LARGE, 1))
            assert await far.recv_tensor(into) is into
            assert is_same(into, noise(LARGE, 1))


@pytest.mark.parametrize("size", [1, 2])
async def test_the_pipes_of_a_group_are_on_the_device_of_their_rank(
    gpu: FakeDevice, size: int
) -> None:
    async with open_group(size, device=gpu.device) as groups:
        await groups[0].next_pipe.send_tensor(noise(LARGE, 1))
        found = await groups[-1].prev_pipe.recv_tensor()
        assert found is not None and found.is_cuda and is_same(found, noise(LARGE, 1))


@pytest.mark.parametrize("nbytes", SIZES)
async def test_a_cancelled_receive_leaves_no_copy_under_way(
    gpu: FakeDevice, nbytes: int
) -> None:
    async with open_pipe_pair("unix", device=gpu.device) as (near, far):

        async def before() -> None:
            await near.send_tensor(noise(nbytes, 1))

        async def check(
            k: int, mode: CancelMode, outcome: Outcome[torch.Tensor | None]
        ) -> None:
            assert not any(one.users for one in gpu.process.space.allocations())
            if outcome.cancelled:
                assert is_same(await far.recv_tensor(), noise(nbytes, 1))
            await near.flush()
            assert far.statistics().held_bytes == 0

        await sweep_cancellation(
            far.recv_tensor, check, before=before, modes=CANCEL_MODES
        )


async def test_a_receive_waits_for_what_its_stream_was_given_before(
    gpu: FakeDevice,
) -> None:
    gate = Gate()
    async with open_pipe_pair("mem", device=gpu.device) as (near, far):
        gpu.tensors.stream(0).add(gate)
        await near.send_tensor(noise(LARGE, 1))
        receiving = asyncio.create_task(far.recv_tensor())
        await until(lambda: far.statistics().held_tensors == 1)
        await asyncio.wait({receiving}, timeout=0.05)
        assert not receiving.done()
        gate.open()
        assert is_same(await receiving, noise(LARGE, 1))


async def test_a_tensor_that_its_gpu_could_not_take_stays_in_the_stream(
    gpu: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(spec: TensorSpec, device: int) -> torch.Tensor:
        raise RuntimeError("CUDA out of memory")

    async with open_pipe_pair("mem", device=gpu.device) as (near, far):
        await near.send_tensor(noise(LARGE, 1))
        with monkeypatch.context() as patched:
            patched.setattr(gpu.tensors, "empty", refuse)
            with pytest.raises(GPUFailed, match="cuda:0 has no 262144 bytes.*memory"):
                await far.recv_tensor()
        assert is_same(await far.recv_tensor(), noise(LARGE, 1))


async def test_a_copy_that_fails_leaves_the_tensor_in_the_stream(
    gpu: FakeDevice,
) -> None:
    gate = Gate()
    async with open_pipe_pair("mem", device=gpu.device) as (near, far):
        gpu.tensors.stream(0).add(gate)
        await near.send_tensor(noise(LARGE, 1))
        gate.fail(GPUFailed("an illegal access", code=700))
        with pytest.raises(GPUFailed, match="illegal access") as caught:
            await far.recv_tensor()
        assert caught.value.code == 700
        assert far.statistics().held_tensors == 1


async def test_a_pipe_that_is_aborted_meanwhile_ends_a_receive(gpu: FakeDevice) -> None:
    open_for_more = threading.Event()
    async with open_pipe_pair("mem", device=gpu.device) as (near, far):
        await near.send_tensor(noise(LARGE, 1))
        await until(lambda: far.statistics().held_tensors == 1)
        assert far._placing is not None
        before = asyncio.create_task(far._placing._calls.call(open_for_more.wait))
        await until_blocked(before)
        receiving = asyncio.create_task(far.recv_tensor())
        await until_blocked(receiving)
        far.abort()
        near.abort()
        open_for_more.set()
        with pytest.raises(PeerLost):
            await receiving
        assert await before


async def test_a_peer_that_dies_meanwhile_does_not_take_what_has_come(
    gpu: FakeDevice,
) -> None:
    gate = Gate()
    async with open_pipe_pair("mem", device=gpu.device) as (near, far):
        gpu.tensors.stream(0).add(gate)
        await near.send_tensor(noise(LARGE, 1))
        await near.flush()
        receiving = asyncio.create_task(far.recv_tensor())
        await until_blocked(receiving)
        near.abort()
        gate.open()
        assert is_same(await receiving, noise(LARGE, 1))
        with pytest.raises(PeerLost):
            await far.recv_tensor()


@pytest.mark.parametrize("seed", range(3))
async def test_whatever_receive_is_cancelled_all_come_once_and_in_order(
    gpu: FakeDevice, seed: int
) -> None:
    chance, received = random.Random(seed), list[torch.Tensor]()

    async def receive(pipe: Pipe) -> None:
        tensor = await pipe.recv_tensor()
        assert tensor is not None
        received.append(tensor)

    async with open_pipe_pair("unix", device=gpu.device) as (near, far):
        sending = asyncio.create_task(send_many(near, 20))
        while len(received) < 20:
            task = asyncio.create_task(receive(far))
            await asyncio.wait({task}, timeout=chance.choice((0, 0.001, 0.003, 1)))
            task.cancel()
            await asyncio.wait({task})
        await sending
    assert all(is_same(found, noise(LARGE, k)) for k, found in enumerate(received))
