"""What a peer says of parts that were granted otherwise, or not at all."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from asynckv.links import progress
from asynckv.links.fd_socket import has_fd_sockets
from asynckv.protocol.frames import Cancel, Failure, Push, Retract
from asynckv.protocol.transfer_frames import (
    Eager,
    Grant,
    Sent,
)
from asynckv.protocol.wire import digest_of
from asynckv.tensors.views import bytes_of
from asynckv.testing.blocked import until
from asynckv.testing.lookup_checks.values import MIB, noise
from harness.fake_gpus import FakeGpus
from harness.gpu_pairs import GpuPair, open_gpu_pair
from harness.nccl_buffer_pairs import open_nccl_buffers
from harness.raw_inserts import RawInsert

pytestmark = pytest.mark.skipif(not has_fd_sockets(), reason="no sockets for handles")


@pytest.fixture
async def pair(gpus: FakeGpus) -> AsyncIterator[GpuPair]:
    async with open_gpu_pair(gpus, reconnect_s=0) as pair:
        yield pair


async def begin(pair: GpuPair) -> RawInsert:
    raw = RawInsert(pair.peer._linked(), MIB)
    assert await raw.hearer.next() == (Grant(raw.transfer, "cuda_ipc", "edges"), b"")
    return raw


async def push(raw: RawInsert, pair: GpuPair) -> int:
    """Announce a layer, and wait until it may be read."""
    transfer = pair.peer._linked().new_transfer()
    raw.stream.send(Push(transfer, 0, inline=False))
    while await raw.hearer.next() != (Grant(transfer, "cuda_ipc", "edges"), b""):
        pass
    return transfer


async def refusal(pair: GpuPair) -> str:
    link = pair.peer._linked()
    await until(lambda: not link.is_open)
    return str(link.error)


async def test_what_is_to_be_read_is_not_sent(pair: GpuPair) -> None:
    raw = await begin(pair)
    raw.stream.send(Sent(raw.transfer, 0, b"", "edges", "nccl"))
    assert "not asked for" in await refusal(pair)


async def test_a_layer_that_is_to_be_read_is_not_sent(pair: GpuPair) -> None:
    raw = RawInsert(pair.peer._linked(), MIB, streaming=True)
    await raw.granted()
    raw.stream.send(Sent(await push(raw, pair), 0, b"", "edges", "nccl"))
    assert "not asked for" in await refusal(pair)


async def test_what_is_to_be_sent_is_not_shown(two_gpus: FakeGpus) -> None:
    async with open_nccl_buffers(two_gpus, reconnect_s=0) as pair:
        await pair.opened()
        link = pair.peer._linked()
        raw = RawInsert(link, MIB, on_gpu=True)
        assert await raw.hearer.next() == (Grant(raw.transfer, "nccl", "full"), b"")
        raw.stream.send(Sent(raw.transfer, 0, b"", "full", "cuda_ipc", 0))
        await until(lambda: not link.is_open)
        assert "not asked for" in str(link.error)


async def test_what_lies_beyond_the_memory_breaks_the_link(pair: GpuPair) -> None:
    raw = await begin(pair)
    raw.stream.send(Sent(raw.transfer, 0, b"d" * 16, "edges", "cuda_ipc", 16 * MIB))
    assert "beyond" in await refusal(pair)
    await until(lambda: not pair.buffer.statistics().used_bytes)


async def test_what_lies_elsewhere_is_granted_for_lanes_and_shown_no_more(
    pair: GpuPair,
) -> None:
    raw = await begin(pair)
    raw.stream.send(Sent(raw.transfer, 0, b"", "off", "cuda_ipc"))
    await raw.granted()
    raw.stream.send(Sent(raw.transfer, 0, b"", "edges", "cuda_ipc", 0))  # late
    raw.stream.send(Cancel())
    await raw.last()


async def test_a_layer_that_lies_elsewhere_is_granted_for_lanes(pair: GpuPair) -> None:
    raw = RawInsert(pair.peer._linked(), MIB, streaming=True)
    await raw.granted()
    transfer = await push(raw, pair)
    raw.stream.send(Sent(transfer, 0, b"", "off", "cuda_ipc"))
    await raw.granted(transfer)
    raw.stream.send(Sent(transfer, 0, b"", "edges", "cuda_ipc", 0))  # late
    raw.stream.send(Cancel())
    await raw.last()


async def test_a_layer_that_is_taken_back_is_let_go_when_nothing_reads_it(
    pair: GpuPair,
) -> None:
    raw = RawInsert(pair.peer._linked(), MIB, streaming=True)
    await raw.granted()
    transfer = await push(raw, pair)
    raw.stream.send(Retract(transfer))
    assert await raw.hearer.next() == (Retract(transfer), b"")
    raw.stream.send(Sent(transfer, 0))
    assert await push(raw, pair) > transfer
    raw.stream.send(Cancel())
    await raw.last()


async def test_other_bytes_than_were_shown_are_refused(pair: GpuPair) -> None:
    raw = await begin(pair)
    raw.stream.send(Sent(raw.transfer, 0, b"of other bytes..", "edges", "cuda_ipc", 0))
    last = await raw.last()
    assert isinstance(last, Failure) and last.code == "ChecksumError"
    assert Grant(raw.transfer) not in [frame for frame, _ in raw.hearer.frames]
    await until(lambda: not pair.buffer.statistics().used_bytes)


@pytest.mark.parametrize("rides", [True, False])
async def test_a_peer_that_falls_silent_after_some_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, pair: GpuPair, rides: bool
) -> None:
    monkeypatch.setattr(progress, "STALL_S", 0.1)
    staging = pair.peer.routes.staging(pair.peer._linked(), MIB)
    assert staging is not None
    staged = await staging.staged(noise(MIB))
    assert staged is not None
    raw = RawInsert(pair.peer._linked(), MIB, 8)
    assert await raw.hearer.next() == (Grant(raw.transfer, "cuda_ipc", "edges"), b"")
    if rides:
        little = bytes(8)
        raw.stream.send(Eager(raw.transfer, (1,), (digest_of(little),)), little)
    else:
        whole = digest_of(bytes_of(noise(MIB)))
        place = staged.region.start
        raw.stream.send(Sent(raw.transfer, 0, whole, "full", "cuda_ipc", place))
    async with asyncio.timeout(10):
        assert "stood still" in await refusal(pair)
    await until(lambda: not pair.buffer.statistics().used_bytes)
    staged.release()


async def test_who_falls_silent_where_nothing_can_be_read_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, pair: GpuPair
) -> None:
    monkeypatch.setattr(progress, "STALL_S", 0.1)
    raw = RawInsert(pair.peer._linked(), MIB, 8)
    assert await raw.hearer.next() == (Grant(raw.transfer, "cuda_ipc", "edges"), b"")
    raw.stream.send(Sent(raw.transfer, 0, b"", "off", "cuda_ipc"))
    async with asyncio.timeout(10):
        assert "stood still" in await refusal(pair)
