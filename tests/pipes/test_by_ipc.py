"""Pipes between two processes on one GPU: each reads where the other has it."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import torch

from asynckv.links.fd_socket import has_fd_sockets
from asynckv.testing.blocked import until
from asynckv.testing.expectations import is_same, noise
from asynckv.testing.pipe_checks import LARGE, PIPE_BYTES
from harness.fake_gpus import FakeGpus
from harness.ipc_pipe_pairs import IpcPipes, open_ipc_pipes

pytestmark = pytest.mark.skipif(not has_fd_sockets(), reason="no sockets for handles")

ODD = LARGE + 12_345
SEEDS = (0, *(pytest.param(seed, marks=pytest.mark.trust) for seed in (1, 2)))
SIZES = (64, LARGE, ODD, 2 * PIPE_BYTES)


@pytest.fixture
async def pair(two_gpus: FakeGpus) -> AsyncIterator[IpcPipes]:
    async with open_ipc_pipes(two_gpus) as pair:
        yield pair


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
