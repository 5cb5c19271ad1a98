"""Pipes between two GPUs: what is sent on one is received on the other by NCCL."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import torch

from asynckv.testing.expectations import is_same, noise
from asynckv.testing.fake_gpus import FakeGpus
from asynckv.testing.nccl_pipe_pairs import NcclPipes, open_nccl_pipes
from asynckv.testing.pipe_checks.values import LARGE, PipeCheck
from asynckv.testing.pipe_conformance import PIPE_CHECKS


@pytest.fixture
async def pair(two_gpus: FakeGpus) -> AsyncIterator[NcclPipes]:
    async with open_nccl_pipes(two_gpus) as pair:
        yield pair


@pytest.mark.parametrize("check", PIPE_CHECKS, ids=lambda check: check.__name__)
async def test_a_pipe_between_gpus_keeps(check: PipeCheck, two_gpus: FakeGpus) -> None:
    async with open_nccl_pipes(two_gpus) as pair:
        await check(pair.near, pair.far)


async def test_a_tensor_goes_from_gpu_to_gpu(pair: NcclPipes) -> None:
    await pair.near.send_tensor(pair.ours.tensor(noise(LARGE, 1)))
    found = await pair.far.recv_tensor()
    assert found is not None and found.device == torch.device("cuda", 1)
    assert is_same(found, noise(LARGE, 1)) and pair.moved
