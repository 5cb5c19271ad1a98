"""What connects the GPUs of a pipe: it breaks, or is missing, and the pipe goes on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from asynckv.errors import (
    ChecksumError,
    GPUFailed,
    PeerLost,
    PipeBroken,
    RemoteProtocolError,
)
from asynckv.links.options import Digest
from asynckv.pipes.endpoints import listen_pipe, open_pipe
from asynckv.protocol.frames import Push
from asynckv.protocol.transfer_frames import Grant, Sent
from asynckv.testing.blocked import until
from asynckv.testing.expectations import is_same, noise
from asynckv.testing.pairs import open_group
from asynckv.testing.pipe_checks import (
    LARGE,
    PIPE_BYTES,
    receive_many,
    send_many,
)
from asynckv.types import TensorSpec
from harness.fake_devices import fake_device_of
from harness.fake_gpus import FakeGpus
from harness.gpu_pipe_pairs import (
    NcclPipes,
    arenas_of,
    expect_by_host,
    gpu_side_of,
    open_nccl_pipes,
)

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


async def test_each_direction_has_room_on_the_gpu_for_all_that_is_in_flight(
    two_gpus: FakeGpus,
) -> None:
    async with open_nccl_pipes(two_gpus, max_bytes=16 * LARGE) as pair:
        gpus = gpu_side_of(pair.near)
        regions = [gpus.spare(16 * LARGE) for _ in range(2)]
        assert all(region is not None for region in regions)
        for region in regions:
            if region is not None:
                region.release()


@pytest.fixture
async def pair(two_gpus: FakeGpus) -> AsyncIterator[NcclPipes]:
    async with open_nccl_pipes(two_gpus) as pair:
        yield pair


@pytest.mark.parametrize(
    ("ours", "theirs", "kind"),
    [
        ("auto", "auto", "full"),
        ("edges", "edges", "edges"),
        ("off", "off", "off"),
        ("off", "full", "full"),
    ],
)
async def test_the_stricter_digest_is_compared(
    two_gpus: FakeGpus,
    sent_devices: list[Sent],
    ours: Digest,
    theirs: Digest,
    kind: str,
) -> None:
    async with open_nccl_pipes(two_gpus, listens=theirs, digest=ours) as pair:
        source = noise(LARGE, 1)
        await pair.near.send_tensor(pair.ours.tensor(source))
        found = await pair.far.recv_tensor()
        assert found is not None and is_same(found, source)
    assert [frame.kind for frame in sent_devices] == [kind]
    assert bool(sent_devices[0].digest) is (kind != "off")


async def test_what_was_never_sent_is_not_granted(pair: NcclPipes) -> None:
    for route in ("nccl", "link"):
        with pytest.raises(RemoteProtocolError, match="never offered"):
            pair.near._outbound.on_grant(Grant(99, route, "off"))


async def test_what_was_not_asked_for_does_not_come(pair: NcclPipes) -> None:
    inbound = pair.far._inbound
    with pytest.raises(RemoteProtocolError, match="no Sent belongs here"):
        inbound.granting.on_sent(Sent(99, 0, b"", "off", "nccl"))


async def test_what_is_granted_again_may_have_been_sent_meanwhile(
    pair: NcclPipes,
) -> None:
    inbound, transfer = pair.far._inbound, pair.near._link.new_transfer()
    push = Push(transfer, spec=TensorSpec((LARGE,), "uint8"), on_gpu=True)
    inbound.on_push(push, b"")
    pair.far_way._stalled(PeerLost("a test"))
    inbound.granting.on_sent(Sent(transfer, 0, b"", "full", "nccl"))
    assert pair.far._link.is_open


ENDS = pytest.mark.parametrize("end", ["near_way", "far_way"])


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
