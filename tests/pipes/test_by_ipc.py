"""Pipes between two processes on one GPU: each reads where the other has it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator

import pytest
import torch

from asynckv.links.fd_socket import has_fd_sockets
from asynckv.pipes.group import join_group
from asynckv.testing.blocked import until
from asynckv.testing.expectations import is_same, noise
from asynckv.testing.fake_devices import fake_device_of
from asynckv.testing.fake_gpus import FakeGpus
from asynckv.testing.ipc_pipe_pairs import IpcPipes, open_ipc_pipes
from asynckv.testing.pipe_checks.values import LARGE, PIPE_BYTES, PipeCheck
from asynckv.testing.pipe_conformance import PIPE_CHECKS
from asynckv.testing.pipe_pairs import free_port

pytestmark = pytest.mark.skipif(not has_fd_sockets(), reason="no sockets for handles")

ODD = LARGE + 12_345
SEEDS = (0, *(pytest.param(seed, marks=pytest.mark.trust) for seed in (1, 2)))
SIZES = (64, LARGE, ODD, 2 * PIPE_BYTES)


@pytest.fixture
async def pair(two_gpus: FakeGpus) -> AsyncIterator[IpcPipes]:
    async with open_ipc_pipes(two_gpus) as pair:
        yield pair


@pytest.mark.both_loops
@pytest.mark.parametrize("check", PIPE_CHECKS, ids=lambda check: check.__name__)
async def test_a_pipe_within_a_gpu_keeps(check: PipeCheck, two_gpus: FakeGpus) -> None:
    async with open_ipc_pipes(two_gpus) as pair:
        await check(pair.near, pair.far)


async def test_a_tensor_never_leaves_the_gpu(pair: IpcPipes) -> None:
    for source in (noise(LARGE, 1), pair.ours.tensor(noise(LARGE, 1))):
        await pair.near.send_tensor(source)
        found = await pair.far.recv_tensor()
        assert found is not None and found.device == torch.device("cuda", 0)
        assert is_same(found, noise(LARGE, 1))
    assert pair.moved == 2
    assert not pair.near._outbound._memory.arena.used_bytes


async def test_the_sender_keeps_nothing_that_the_receiver_has(pair: IpcPipes) -> None:
    await pair.near.send_tensor(pair.ours.tensor(noise(LARGE, 1)))
    await pair.near.flush()
    assert pair.used_bytes == LARGE  # the receiver's own
    found = await pair.far.recv_tensor()
    assert is_same(found, noise(LARGE, 1))
    del found
    await until(lambda: not pair.used_bytes)


async def test_both_sides_send_at_once(pair: IpcPipes) -> None:
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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.bool])
async def test_any_dtype_and_any_strides_are_read(
    pair: IpcPipes, dtype: torch.dtype
) -> None:
    tensor = (noise(2 * LARGE, 1) % 2).view(512, -1).to(dtype)
    for source in (tensor, pair.ours.tensor(tensor), tensor.t()):
        await pair.near.send_tensor(source)
        found = await pair.far.recv_tensor()
        assert found is not None and found.shape == source.shape
        assert found.dtype == dtype and is_same(found, source.cpu().contiguous())
    assert pair.moved == 3


async def test_into_memory_of_the_host_or_of_the_gpu(pair: IpcPipes) -> None:
    source = pair.ours.tensor(noise(LARGE, 1))
    empty = torch.zeros(LARGE, dtype=torch.uint8)
    for into in (empty, pair.theirs.tensor(empty)):
        await pair.near.send_tensor(source)
        assert await pair.far.recv_tensor(into) is into
        assert is_same(into, noise(LARGE, 1))
    assert pair.moved == 2
    await until(lambda: not pair.used_bytes)


async def test_the_tensor_may_be_overwritten_when_it_was_sent(pair: IpcPipes) -> None:
    source = pair.ours.tensor(noise(LARGE, 1))
    await pair.near.send_tensor(source)
    source.fill_(7)
    found = await pair.far.recv_tensor()
    assert found is not None and is_same(found, noise(LARGE, 1)) and pair.moved


async def test_what_has_no_room_on_the_gpu_comes_by_host(pair: IpcPipes) -> None:
    kept = []
    for seed in range(10):
        await pair.near.send_tensor(noise(LARGE, seed))
        found = await pair.far.recv_tensor()
        assert found is not None and is_same(found, noise(LARGE, seed))
        kept.append(found)
    assert all(found.is_cuda for found in kept) and is_same(kept[0], noise(LARGE, 0))
    assert pair.near.transport == pair.far.transport == "cuda_ipc"


async def test_a_tensor_above_the_bound_goes_by_host(pair: IpcPipes) -> None:
    await pair.near.send_tensor(pair.ours.tensor(noise(9 * LARGE, 1)))
    assert is_same(await pair.far.recv_tensor(), noise(9 * LARGE, 1))
    assert not pair.moved and pair.near.transport == "cuda_ipc"


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("breaks", [False, True])
async def test_all_come_once_and_in_order_whichever_way(
    seed: int, breaks: bool
) -> None:
    gpus = FakeGpus(seed=seed, max_delay=3)
    chance = random.Random(seed)
    contents = {size: noise(size, 1) for size in SIZES}
    async with open_ipc_pipes(gpus) as pair:
        on_gpu = {size: pair.ours.tensor(contents[size]) for size in SIZES}
        sizes = [chance.choice((0, *SIZES)) for _ in range(24)]

        async def send() -> None:
            for number, size in enumerate(sizes):
                await pair.near.send_tensor(chance.choice((contents, on_gpu)).get(size))
                if breaks and number == 12:
                    chance.choice((pair.near_sharing, pair.far_sharing))._lost("a test")

        sending = asyncio.create_task(send())
        for size in sizes:
            found = await pair.far.recv_tensor()
            assert (found is None) is (not size)
            assert found is None or (found.is_cuda and is_same(found, contents[size]))
        await sending
        await pair.near.flush()
        del found
        assert pair.moved and not pair.far.statistics().held_bytes
        await until(lambda: not pair.used_bytes)
        await until(lambda: pair.opened == (0 if breaks else 2))
    assert not gpus.faults
    gpus.close()


async def test_ranks_of_a_group_share_their_gpu_and_pass_barriers(
    two_gpus: FakeGpus,
) -> None:
    ranks = [fake_device_of(two_gpus.process()) for _ in (0, 1)]
    port = free_port()
    groups = [
        join_group(
            rank=rank,
            size=2,
            host="127.0.0.1",
            port=port,
            max_bytes=PIPE_BYTES,
            device=gpu.device,
        )
        for rank, gpu in enumerate(ranks)
    ]
    first, second = await asyncio.gather(*(group.__aenter__() for group in groups))
    try:
        await second.pipe_to(0).gpus_settled()
        await until(lambda: first.pipe_to(1).transport == "cuda_ipc")
        await first.next_pipe.send_tensor(ranks[0].tensor(noise(LARGE, 1)))
        await asyncio.gather(first.barrier(), second.barrier())
        assert is_same(await second.prev_pipe.recv_tensor(), noise(LARGE, 1))
        assert second.pipe_to(0).transport == "cuda_ipc"
    finally:
        for group in groups:
            await group.__aexit__(None, None, None)
