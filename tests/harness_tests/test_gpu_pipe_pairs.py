from __future__ import annotations

import pytest

from asynckv.testing.pairs import open_pipe_pair
from harness.fake_devices import fake_device_of
from harness.fake_gpus import FakeGpus
from harness.gpu_pipe_pairs import (
    arenas_of,
    expect_by_host,
    gpu_side_of,
    open_pipes_on,
)
from harness.nccl_pipe_pairs import open_nccl_pipes


async def test_a_pipe_that_goes_another_way_than_expected_is_told(
    two_gpus: FakeGpus,
) -> None:
    gpus = [fake_device_of(two_gpus.process(), number) for number in (0, 1)]
    with pytest.raises(AssertionError, match="nccl"):
        async with open_pipes_on(gpus[0], gpus[1], expected="cuda_ipc"):
            raise AssertionError


async def test_what_does_not_come_by_host_is_told(two_gpus: FakeGpus) -> None:
    async with open_nccl_pipes(two_gpus) as pair:
        with pytest.raises(AssertionError, match="it came by .*nccl"):
            await expect_by_host(pair)


async def test_a_pair_whose_way_breaks_goes_by_host(two_gpus: FakeGpus) -> None:
    for near in (True, False):
        async with open_nccl_pipes(two_gpus) as pair:
            assert arenas_of(pair.ours) and arenas_of(pair.theirs)
            pair.break_off(near=near)
            await expect_by_host(pair)


async def test_a_pipe_without_a_gpu_has_no_side_on_one() -> None:
    async with open_pipe_pair() as (near, _):
        with pytest.raises(LookupError, match="no GPU"):
            gpu_side_of(near)
