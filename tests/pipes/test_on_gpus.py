"""Pipes on GPUs: of one process, between two GPUs, or two processes of one."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import random
import threading
from collections.abc import AsyncIterator, Iterator
from functools import partial
from typing import Any, Protocol

import pytest
import torch

from asynckv.errors import GPUFailed, PeerLost
from asynckv.links.fd_socket import has_fd_sockets
from asynckv.pipes.endpoints import listen_pipe, open_pipe
from asynckv.pipes.group import join_group
from asynckv.pipes.pipe import Pipe
from asynckv.testing import (
    CancelMode,
    Outcome,
    sweep_cancellation,
    until,
    until_blocked,
)
from asynckv.testing.expectations import CANCEL_MODES, is_same, noise
from asynckv.testing.pairs import free_port, open_group, open_pipe_pair
from asynckv.testing.pipe_checks import (
    LARGE,
    PIPE_BYTES,
    PIPE_CHECKS,
    SIZES,
    PipeCheck,
    check_pipe,
    receive_many,
    send_many,
)
from asynckv.types import TensorSpec
from harness.fake_devices import FakeDevice, fake_device, fake_device_of
from harness.fake_gpus import FakeGpus
from harness.fake_gpus.gates import Gate
from harness.gpu_pipe_pairs import (
    GpuPipes,
    arenas_of,
    expect_by_host,
    open_ipc_pipes,
    open_nccl_pipes,
)

HAS_HANDLES = pytest.mark.skipif(not has_fd_sockets(), reason="no sockets for handles")
WAYS = pytest.mark.parametrize(
    "open_pipes",
    [
        pytest.param(open_nccl_pipes, id="nccl"),
        pytest.param(open_ipc_pipes, id="cuda_ipc", marks=HAS_HANDLES),
        pytest.param(
            functools.partial(open_ipc_pipes, theirs=1),
            id="peer access",
            marks=HAS_HANDLES,
        ),
    ],
)
SEEDS = (0, *(pytest.param(seed, marks=pytest.mark.trust) for seed in (1, 2)))
MIXED_SIZES = (64, LARGE, LARGE + 12_345, 2 * PIPE_BYTES)


class Open(Protocol):
    """Opens both sides of a pipe that goes one of the ways."""

    def __call__(
        self, gpus: FakeGpus, *, is_connected: bool = True, **options: Any
    ) -> contextlib.AbstractAsyncContextManager[GpuPipes]: ...


@pytest.fixture
async def pair(two_gpus: FakeGpus, open_pipes: Open) -> AsyncIterator[GpuPipes]:
    async with open_pipes(two_gpus) as pair:
        yield pair


@WAYS
@pytest.mark.parametrize("check", PIPE_CHECKS, ids=lambda check: check.__name__)
async def test_such_a_pipe_keeps(
    check: PipeCheck, two_gpus: FakeGpus, open_pipes: Open
) -> None:
    async with open_pipes(two_gpus) as pair:
        await check(pair.near, pair.far)


@WAYS
async def test_both_sides_send_at_once(pair: GpuPipes) -> None:
    sides = ((pair.near, pair.far, pair.ours), (pair.far, pair.near, pair.theirs))
    sources = [gpu.tensor(noise(LARGE, 1)) for _, _, gpu in sides]

    async def send(number: int) -> None:
        for _ in range(3):
            await sides[number][0].send_tensor(sources[number])

    async def receive(number: int) -> None:
        for _ in range(3):
            found = await sides[number][1].recv_tensor()
            assert found is not None and is_same(found, noise(LARGE, 1))

    await asyncio.gather(*(do(number) for do in (send, receive) for number in (0, 1)))
    await until(lambda: not pair.used_bytes)


@WAYS
async def test_into_memory_of_the_host_or_of_the_gpu(pair: GpuPipes) -> None:
    source = pair.ours.tensor(noise(LARGE, 1))
    empty = torch.zeros(LARGE, dtype=torch.uint8)
    for into in (empty, pair.theirs.tensor(empty)):
        await pair.near.send_tensor(source)
        assert await pair.far.recv_tensor(into) is into
        assert is_same(into, noise(LARGE, 1))
    assert pair.moved == 2
    await until(lambda: not pair.used_bytes)


@WAYS
async def test_the_tensor_may_be_overwritten_when_it_was_sent(pair: GpuPipes) -> None:
    source = pair.ours.tensor(noise(LARGE, 1))
    await pair.near.send_tensor(source)
    source.fill_(7)
    found = await pair.far.recv_tensor()
    assert found is not None and is_same(found, noise(LARGE, 1)) and pair.moved


@WAYS
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("breaks", [False, True])
@pytest.mark.usefixtures("two_gpus")  # what connects them has time
async def test_all_come_once_and_in_order_whichever_way(
    open_pipes: Open, seed: int, breaks: bool
) -> None:
    gpus = FakeGpus(2, seed=seed, max_delay=3)
    chance = random.Random(seed)
    contents = {size: noise(size, 1) for size in MIXED_SIZES}
    async with open_pipes(gpus) as pair:
        on_gpu = {size: pair.ours.tensor(contents[size]) for size in MIXED_SIZES}
        sizes = [chance.choice((0, *MIXED_SIZES)) for _ in range(24)]
        opened, moved = pair.opened, 0

        async def send() -> None:
            nonlocal moved
            for number, size in enumerate(sizes):
                await pair.near.send_tensor(chance.choice((contents, on_gpu)).get(size))
                if number == 12:
                    moved = pair.moved
                    if breaks:
                        pair.break_off(near=chance.choice((True, False)))

        sending = asyncio.create_task(send())
        for size in sizes:
            found = await pair.far.recv_tensor()
            assert (found is None) is (not size)
            assert found is None or (found.is_cuda and is_same(found, contents[size]))
        await sending
        await pair.near.flush()
        del found
        assert moved and not pair.far.statistics().held_bytes
        await until(lambda: not pair.used_bytes)
        await until(lambda: pair.opened == (0 if breaks else opened))
    assert not gpus.faults
    gpus.close()


@pytest.mark.parametrize(
    ("number", "reaches", "way"),
    [
        (1, False, "nccl"),
        pytest.param(1, True, "cuda_ipc", marks=HAS_HANDLES),
        pytest.param(0, False, "cuda_ipc", marks=HAS_HANDLES),
    ],
)
async def test_ranks_of_a_group_send_on_their_gpus_and_pass_barriers(
    two_gpus: FakeGpus, number: int, reaches: bool, way: str
) -> None:
    two_gpus.has_peer_access = reaches
    ranks = [fake_device_of(two_gpus.process(), at) for at in (0, number)]
    port = free_port()
    async with contextlib.AsyncExitStack() as stack:
        joining = [
            stack.enter_async_context(
                join_group(
                    rank=rank,
                    size=2,
                    host="127.0.0.1",
                    port=port,
                    max_bytes=PIPE_BYTES,
                    device=gpu.device,
                )
            )
            for rank, gpu in enumerate(ranks)
        ]
        first, second = await asyncio.gather(*joining)
        await second.pipe_to(0).gpus_settled()
        await until(lambda: first.pipe_to(1).transport == way)
        await first.next_pipe.send_tensor(ranks[0].tensor(noise(LARGE, 1)))
        await asyncio.gather(first.barrier(), second.barrier())
        found = await second.prev_pipe.recv_tensor()
        assert found is not None and found.device == torch.device("cuda", number)
        assert is_same(found, noise(LARGE, 1))
        assert second.pipe_to(0).transport == way


@WAYS
@pytest.mark.parametrize("url", ["?payload=inline", "?payload=map"])
async def test_a_url_that_asks_for_lanes_gets_them(
    two_gpus: FakeGpus, open_pipes: Open, url: str
) -> None:
    async with open_pipes(two_gpus, url=url, is_connected=False) as pair:
        await expect_by_host(pair)
        assert pair.near._sends.gpus is None


@WAYS
async def test_what_has_come_can_be_taken_from_a_peer_that_died(
    pair: GpuPipes,
) -> None:
    await pair.near.send_tensor(pair.ours.tensor(noise(LARGE, 1)))
    await pair.near.flush()
    pair.near.abort()
    await until(lambda: not pair.far._link.is_open)
    await until(lambda: not pair.opened)
    assert is_same(await pair.far.recv_tensor(), noise(LARGE, 1))
    with pytest.raises(PeerLost):
        await pair.far.recv_tensor()


@WAYS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.bool])
async def test_any_dtype_goes_from_gpu_to_gpu(
    pair: GpuPipes, dtype: torch.dtype
) -> None:
    tensor = (noise(2 * LARGE, 1) % 2).view(512, -1).to(dtype)
    await pair.near.send_tensor(pair.ours.tensor(tensor))
    found = await pair.far.recv_tensor()
    assert found is not None and found.shape == tensor.shape
    assert found.dtype == dtype and is_same(found, tensor) and pair.moved


@WAYS
async def test_a_tensor_above_the_bound_goes_by_host(pair: GpuPipes) -> None:
    await pair.near.send_tensor(pair.ours.tensor(noise(9 * LARGE, 1)))
    assert is_same(await pair.far.recv_tensor(), noise(9 * LARGE, 1))
    assert not pair.moved and pair.near.transport != "inline"


@WAYS
async def test_what_was_received_outlives_its_pipe(
    two_gpus: FakeGpus, open_pipes: Open
) -> None:
    async with open_pipes(two_gpus) as pair:
        await pair.near.send_tensor(noise(LARGE, 1))
        found = await pair.far.recv_tensor()
    assert found is not None and is_same(found, noise(LARGE, 1))
    assert arenas_of(pair.theirs)
    del found
    gc.collect()
    await until(lambda: not (arenas_of(pair.ours) or arenas_of(pair.theirs)))


@WAYS
async def test_nothing_is_left_on_a_gpu(two_gpus: FakeGpus, open_pipes: Open) -> None:
    async with open_pipes(two_gpus) as pair:
        await asyncio.gather(send_many(pair.near, 8), receive_many(pair.far, 8))
        assert arenas_of(pair.ours) and arenas_of(pair.theirs)
    await until(lambda: not (arenas_of(pair.ours) or arenas_of(pair.theirs)))
    assert not pair.opened


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
