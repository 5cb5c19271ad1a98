"""Pipes between two GPUs: what is sent on one is received on the other by NCCL."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator

import pytest
import torch

from asynckv.errors import PeerLost
from asynckv.pipes.group import join_group
from asynckv.testing.blocked import until
from asynckv.testing.expectations import is_same, noise
from asynckv.testing.fake_devices import fake_device_of
from asynckv.testing.fake_gpus import FakeGpus
from asynckv.testing.nccl_pipe_pairs import NcclPipes, open_nccl_pipes
from asynckv.testing.pipe_checks.values import LARGE, PIPE_BYTES, PipeCheck
from asynckv.testing.pipe_conformance import PIPE_CHECKS
from asynckv.testing.pipe_pairs import free_port

ODD = LARGE + 12_345
SEEDS = (0, *(pytest.param(seed, marks=pytest.mark.trust) for seed in (1, 2)))
SIZES = (64, LARGE, ODD, 2 * PIPE_BYTES)


@pytest.fixture
async def pair(two_gpus: FakeGpus) -> AsyncIterator[NcclPipes]:
    async with open_nccl_pipes(two_gpus) as pair:
        yield pair


@pytest.mark.both_loops
@pytest.mark.parametrize("check", PIPE_CHECKS, ids=lambda check: check.__name__)
async def test_a_pipe_between_gpus_keeps(check: PipeCheck, two_gpus: FakeGpus) -> None:
    async with open_nccl_pipes(two_gpus) as pair:
        await check(pair.near, pair.far)


async def test_a_tensor_goes_from_gpu_to_gpu(pair: NcclPipes) -> None:
    await pair.near.send_tensor(pair.ours.tensor(noise(LARGE, 1)))
    found = await pair.far.recv_tensor()
    assert found is not None and found.device == torch.device("cuda", 1)
    assert is_same(found, noise(LARGE, 1)) and pair.moved


async def test_both_sides_send_at_once(pair: NcclPipes) -> None:
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
async def test_any_dtype_and_any_strides_go_from_gpu_to_gpu(
    pair: NcclPipes, dtype: torch.dtype
) -> None:
    tensor = (noise(2 * LARGE, 1) % 2).view(512, -1).to(dtype)
    await pair.near.send_tensor(pair.ours.tensor(tensor))
    found = await pair.far.recv_tensor()
    assert found is not None and found.shape == tensor.shape
    assert found.dtype == dtype and is_same(found, tensor) and pair.moved


async def test_into_memory_of_the_host_or_of_the_gpu(pair: NcclPipes) -> None:
    source = pair.ours.tensor(noise(LARGE, 1))
    empty = torch.zeros(LARGE, dtype=torch.uint8)
    for into in (empty, pair.theirs.tensor(empty)):
        await pair.near.send_tensor(source)
        assert await pair.far.recv_tensor(into) is into
        assert is_same(into, noise(LARGE, 1))
    assert pair.moved == 2
    await until(lambda: not pair.used_bytes)


async def test_what_does_not_fit_stays_in_the_stream(pair: NcclPipes) -> None:
    await pair.near.send_tensor(pair.ours.tensor(noise(LARGE, 1)))
    with pytest.raises(ValueError, match="the tensor is"):
        await pair.far.recv_tensor(torch.zeros(3, dtype=torch.uint8))
    found = await pair.far.recv_tensor()
    assert found is not None and is_same(found, noise(LARGE, 1))


async def test_the_tensor_may_be_overwritten_when_it_was_sent(pair: NcclPipes) -> None:
    source = pair.ours.tensor(noise(LARGE, 1))
    await pair.near.send_tensor(source)
    source.fill_(7)
    found = await pair.far.recv_tensor()
    assert found is not None and is_same(found, noise(LARGE, 1)) and pair.moved


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("breaks", [False, True])
async def test_all_come_once_and_in_order_whichever_way(
    two_gpus: FakeGpus, seed: int, breaks: bool
) -> None:
    chance = random.Random(seed)
    contents = {size: noise(size, 1) for size in SIZES}
    async with open_nccl_pipes(two_gpus) as pair:
        on_gpu = {size: pair.ours.tensor(contents[size]) for size in SIZES}
        sizes = [chance.choice((0, *SIZES)) for _ in range(24)]
        moved: list[int] = []

        async def send() -> None:
            for number, size in enumerate(sizes):
                source = chance.choice((contents, on_gpu)).get(size)
                await pair.near.send_tensor(source)
                moved.append(pair.moved)
                if breaks and number == 12:
                    chance.choice((pair.near_way, pair.far_way))._stalled(PeerLost("-"))

        sending = asyncio.create_task(send())
        for size in sizes:
            found = await pair.far.recv_tensor()
            assert (found is None) is (not size)
            assert found is None or (found.is_cuda and is_same(found, contents[size]))
        await sending
        await pair.near.flush()
        del found
        assert any(moved) and not pair.far.statistics().held_bytes
        await until(lambda: not pair.used_bytes)


async def test_ranks_of_a_group_send_from_gpu_to_gpu_and_pass_barriers(
    two_gpus: FakeGpus,
) -> None:
    ranks = [fake_device_of(two_gpus.process(), rank) for rank in (0, 1)]
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
        await until(lambda: first.pipe_to(1).transport == "nccl")
        await first.next_pipe.send_tensor(ranks[0].tensor(noise(LARGE, 1)))
        await asyncio.gather(first.barrier(), second.barrier())
        found = await second.prev_pipe.recv_tensor()
        assert found is not None and found.device == torch.device("cuda", 1)
        assert is_same(found, noise(LARGE, 1))
        assert second.pipe_to(0).transport == "nccl"
