"""What connects the GPUs of a pipe: opened beside it, or not, and the pipe goes on."""

from __future__ import annotations

from typing import Any

import pytest

from asynckv.pipes.opening import listen_pipe, open_pipe
from asynckv.testing.blocked import until
from asynckv.testing.expectations import is_same, noise
from asynckv.testing.pairs import open_group
from asynckv.testing.pipe_checks import (
    LARGE,
    PIPE_BYTES,
)
from harness.fake_devices import fake_device_of
from harness.fake_gpus import FakeGpus
from harness.gpu_pipe_pairs import arenas_of, expect_by_host
from harness.nccl_pipe_pairs import open_nccl_pipes

BY_HOST = "goes through host memory"


async def test_the_side_that_accepted_has_settled_when_its_gpu_is_connected(
    two_gpus: FakeGpus,
) -> None:
    async with open_nccl_pipes(two_gpus, is_connected=False) as pair:
        await until(lambda: pair.far._sends.gpus is not None)
        await pair.far.gpus_settled()
        assert pair.far.transport == "nccl"


async def test_versions_that_differ_are_no_way(
    two_gpus: FakeGpus, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    async with open_nccl_pipes(two_gpus, their_nccl=1, is_connected=False) as pair:
        await until(lambda: caplog.text.count(BY_HOST) == 2)
        await expect_by_host(pair)
        await expect_by_host(pair)
    assert caplog.text.count(BY_HOST) == 2 and "NCCL 1 here" in caplog.text


@pytest.mark.usefixtures("lacking_nccl")
async def test_without_nccl_there_is_no_way(
    two_gpus: FakeGpus, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    async with open_nccl_pipes(two_gpus, is_connected=False) as pair:
        await until(lambda: "no NCCL here" in caplog.text)
        await expect_by_host(pair)


async def test_a_peer_without_a_gpu_refuses(
    two_gpus: FakeGpus, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    gpu = fake_device_of(two_gpus.process())
    async with (
        listen_pipe("tcp://127.0.0.1:0") as listener,
        open_pipe(listener.url, device=gpu.device) as near,
        await listener.accept() as far,
    ):
        await until(lambda: "no GPU to connect" in caplog.text)
        await near.send_tensor(noise(LARGE, 1))
        assert is_same(await far.recv_tensor(), noise(LARGE, 1))


async def test_a_pipe_within_one_process_goes_by_host(
    two_gpus: FakeGpus, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    gpu = fake_device_of(two_gpus.process())
    options: Any = {"device": gpu.device, "max_bytes": PIPE_BYTES}
    async with (
        listen_pipe("tcp://127.0.0.1:0", **options) as listener,
        open_pipe(listener.url, **options) as near,
        await listener.accept() as far,
    ):
        await until(lambda: BY_HOST in caplog.text)
        await until(lambda: not arenas_of(gpu))
        await near.send_tensor(noise(LARGE, 1))
        found = await far.recv_tensor()
        assert found is not None and found.is_cuda and is_same(found, noise(LARGE, 1))


async def test_the_pipes_of_a_group_are_connected(two_gpus: FakeGpus) -> None:
    device = fake_device_of(two_gpus.process()).device
    async with open_group(2, device=device) as groups:
        pipe = groups[0].next_pipe
        assert pipe is groups[0].pipe_to(1)
        for one in (pipe, groups[1].pipe_to(0)):
            await until(lambda one=one: one._sends.gpus is not None)  # type: ignore[misc]
            await one.gpus_settled()
            assert one.transport == "inline"  # both ranks are of one process
