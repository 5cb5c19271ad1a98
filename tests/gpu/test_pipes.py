"""Pipes with ``device=`` on a real GPU. ``nox -s gpu`` runs it."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from asynckv.testing.expectations import is_same, noise
from asynckv.testing.pairs import open_pipe_pair
from asynckv.testing.pipe_checks import PIPE_CHECKS, PipeCheck

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        importlib.util.find_spec("cupy") is None,
        reason='CuPy is not installed: pip install ".[cuda12]"',
    ),
]

_LARGE = 64 * 2**20


@pytest.mark.parametrize("check", PIPE_CHECKS, ids=lambda check: check.__name__)
async def test_a_pipe_on_a_gpu_keeps(check: PipeCheck) -> None:
    async with open_pipe_pair("unix", device="cuda:0") as (near, far):
        await check(near, far)


async def test_a_tensor_goes_from_a_gpu_to_the_host_and_back() -> None:
    content = noise(_LARGE, 1)
    async with open_pipe_pair(device="cuda:0", max_bytes="128MiB") as (near, far):
        await near.send_tensor(content)
        there = await far.recv_tensor()
        assert there is not None and there.device == torch.device("cuda", 0)
        await far.send_tensor(there)
        back = await near.recv_tensor(torch.zeros_like(content))
        assert is_same(back, content)


async def test_memory_that_another_stream_still_reads_is_not_written() -> None:
    """What the caller's stream has freed and not read yet may be given out again."""
    async with open_pipe_pair(device="cuda:0", max_bytes="128MiB") as (near, far):
        await near.send_tensor(noise(_LARGE, 2))
        await near.flush()
        with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
            freed = noise(_LARGE, 1).cuda()
            kept = torch.empty_like(freed)
            torch.cuda._sleep(200_000_000)  # type: ignore[no-untyped-call]
            kept.copy_(freed)
            del freed
            found = await far.recv_tensor()
        assert is_same(kept, noise(_LARGE, 1)) and is_same(found, noise(_LARGE, 2))
