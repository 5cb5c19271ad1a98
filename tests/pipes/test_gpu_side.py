"""What connects two GPUs, where it breaks or has no room: the pipe goes on."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator

import pytest

from asynckv.errors import (
    ChecksumError,
    GPUFailed,
    PeerLost,
    PipeBroken,
)
from asynckv.testing.blocked import until
from asynckv.testing.expectations import is_same, noise
from asynckv.testing.pipe_checks import (
    LARGE,
    receive_many,
    send_many,
)
from harness.fake_gpus import FakeGpus
from harness.gpu_pipe_pairs import arenas_of, expect_by_host
from harness.nccl_pipe_pairs import NcclPipes, open_nccl_pipes

BY_HOST = "goes through host memory"
ENDS = pytest.mark.parametrize("end", ["near_way", "far_way"])


@pytest.fixture
async def pair(two_gpus: FakeGpus) -> AsyncIterator[NcclPipes]:
    async with open_nccl_pipes(two_gpus) as pair:
        yield pair


async def stall(pair: NcclPipes) -> asyncio.Task[None]:
    """Send what does not arrive: the sender's NCCL posts nothing that is seen."""
    pair.ours.process.nccl.is_silent = True
    await pair.near.send_tensor(pair.ours.tensor(noise(LARGE, 1)))
    await pair.near.send_tensor(None)
    await until(lambda: pair.far_way.transport.receiver.is_busy)
    return asyncio.create_task(check_stalled(pair))


async def check_stalled(pair: NcclPipes) -> None:
    found = await pair.far.recv_tensor()
    assert found is not None and found.is_cuda and is_same(found, noise(LARGE, 1))
    assert await pair.far.recv_tensor() is None
    await pair.near.flush()


@ENDS
async def test_after_a_worker_was_given_up_the_pipe_goes_on(
    pair: NcclPipes, end: str, caplog: pytest.LogCaptureFixture
) -> None:
    getattr(pair, end).transport._worker.give_up(GPUFailed("it is stuck"))
    await until(lambda: "inline" in {pair.near.transport, pair.far.transport})
    await expect_by_host(pair)
    assert "from here on" in caplog.text


@ENDS
async def test_what_was_under_way_when_the_way_broke_comes_by_host(
    pair: NcclPipes, end: str
) -> None:
    receiving = await stall(pair)
    getattr(pair, end)._stalled(PeerLost("nothing has come for long"))
    await receiving
    await expect_by_host(pair)
    await until(lambda: not pair.used_bytes)


@ENDS
async def test_what_was_under_way_when_a_worker_was_given_up_comes_by_host(
    two_gpus: FakeGpus, end: str
) -> None:
    async with open_nccl_pipes(two_gpus) as pair:
        worker = getattr(pair, end).transport._worker
        receiving = await stall(pair)
        worker.give_up(GPUFailed("it is stuck"))
        await receiving
        # From memory of the host: a GPU that is stuck allocates nothing any more.
        await asyncio.gather(send_many(pair.near, 2), receive_many(pair.far, 2))
    for gpu in (pair.ours, pair.theirs):
        gpu.process.end()
    worker.kept.clear()  # as it would be for ever
    worker._flights.clear()


async def test_a_peer_that_dies_meanwhile_ends_both_calls(pair: NcclPipes) -> None:
    receiving = await stall(pair)
    pair.near.abort()
    with pytest.raises(PeerLost):
        await receiving
    with pytest.raises(PeerLost):
        await pair.far.recv_tensor()
    await until(lambda: pair.far_way.transport.is_quiet)
    await until(lambda: not pair.used_bytes)


async def test_other_bytes_than_were_sent_are_noticed(
    pair: NcclPipes, monkeypatch: pytest.MonkeyPatch
) -> None:
    near = pair.near._sends.gpus
    assert near is not None

    async def lie(*anything: object) -> list[bytes]:
        return [b"another digest.."]

    monkeypatch.setattr(near.pool, "digest", lie)
    await pair.near.send_tensor(pair.ours.tensor(noise(LARGE, 1)))
    with pytest.raises(ChecksumError):
        await pair.far.recv_tensor()
    with pytest.raises(PipeBroken):
        await pair.near.flush()


async def test_what_cannot_be_compared_comes_by_host(
    pair: NcclPipes, monkeypatch: pytest.MonkeyPatch
) -> None:
    far = pair.far._sends.gpus
    assert far is not None

    async def fail(*anything: object) -> list[bytes]:
        raise GPUFailed("it has fallen off the bus")

    monkeypatch.setattr(far.pool, "digest", fail)
    await pair.near.send_tensor(pair.ours.tensor(noise(LARGE, 1)))
    assert is_same(await pair.far.recv_tensor(), noise(LARGE, 1))
    await until(lambda: not pair.used_bytes)


async def test_what_its_gpu_does_not_give_back_breaks_the_pipe(
    pair: NcclPipes, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*anything: object) -> list[bytes]:
        raise GPUFailed("it has fallen off the bus")

    near = pair.near._sends.gpus
    assert near is not None
    monkeypatch.setattr(near.pool, "digest", fail)
    await pair.near.send_tensor(pair.ours.tensor(noise(LARGE, 1)))
    with pytest.raises(PipeBroken, match="off the bus"):
        await pair.near.flush()
    with pytest.raises(PeerLost, match="off the bus"):
        await pair.far.recv_tensor()


async def test_what_has_no_room_on_a_gpu_comes_by_host(two_gpus: FakeGpus) -> None:
    async with open_nccl_pipes(two_gpus) as pair:
        kept = []
        for seed in range(10):
            await pair.near.send_tensor(pair.ours.tensor(noise(LARGE, seed)))
            found = await pair.far.recv_tensor()
            assert found is not None and is_same(found, noise(LARGE, seed))
            kept.append(found)
        assert pair.moved == 8 and all(found.is_cuda for found in kept)
        assert is_same(kept[0], noise(LARGE, 0))


async def test_a_tensor_above_the_bound_goes_by_host(pair: NcclPipes) -> None:
    await pair.near.send_tensor(pair.ours.tensor(noise(9 * LARGE, 1)))
    assert is_same(await pair.far.recv_tensor(), noise(9 * LARGE, 1))
    assert not pair.moved and pair.near.transport == "nccl"


async def test_what_was_received_outlives_its_pipe(two_gpus: FakeGpus) -> None:
    async with open_nccl_pipes(two_gpus) as pair:
        await pair.near.send_tensor(noise(LARGE, 1))
        found = await pair.far.recv_tensor()
    assert found is not None and is_same(found, noise(LARGE, 1))
    assert arenas_of(pair.theirs)
    del found
    gc.collect()
    await until(lambda: not arenas_of(pair.theirs))


async def test_nothing_is_left_on_a_gpu(two_gpus: FakeGpus) -> None:
    async with open_nccl_pipes(two_gpus) as pair:
        await asyncio.gather(send_many(pair.near, 8), receive_many(pair.far, 8))
        assert arenas_of(pair.ours) and arenas_of(pair.theirs)
    await until(lambda: not (arenas_of(pair.ours) or arenas_of(pair.theirs)))
