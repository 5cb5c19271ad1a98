"""Pipes between two GPUs, or two processes of one: what holds of both alike."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import random
from collections.abc import AsyncIterator
from typing import Any, Protocol

import pytest
import torch

from asynckv.errors import PeerLost
from asynckv.links.fd_socket import has_fd_sockets
from asynckv.pipes.group import join_group
from asynckv.testing.blocked import until
from asynckv.testing.expectations import is_same, noise
from asynckv.testing.pairs import free_port
from asynckv.testing.pipe_checks import (
    LARGE,
    PIPE_BYTES,
    PIPE_CHECKS,
    PipeCheck,
)
from harness.fake_devices import fake_device_of
from harness.fake_gpus import FakeGpus
from harness.gpu_pipe_pairs import GpuPipes, expect_by_host
from harness.ipc_pipe_pairs import open_ipc_pipes
from harness.nccl_pipe_pairs import open_nccl_pipes

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
SIZES = (64, LARGE, LARGE + 12_345, 2 * PIPE_BYTES)


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
    contents = {size: noise(size, 1) for size in SIZES}
    async with open_pipes(gpus) as pair:
        on_gpu = {size: pair.ours.tensor(contents[size]) for size in SIZES}
        sizes = [chance.choice((0, *SIZES)) for _ in range(24)]
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
