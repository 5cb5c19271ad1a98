"""What a peer may say of parts, however they were granted."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator

import pytest

from asynckv.buffers.lookup import LookupBuffer
from asynckv.buffers.serve import serve
from asynckv.devices.copying import CopyPool
from asynckv.errors import PeerLost
from asynckv.links import link as progress
from asynckv.links.dial import dial
from asynckv.links.fd_socket import has_fd_sockets
from asynckv.protocol.frames import Accepted, Cancel, Failure, Push, Retract
from asynckv.protocol.transfer_frames import (
    Eager,
    Grant,
    Sent,
)
from asynckv.protocol.wire import digest_of
from asynckv.tensors.views import bytes_of
from asynckv.testing.blocked import until
from asynckv.testing.expectations import is_same
from asynckv.testing.lookup_checks.values import MIB, noise
from harness.fake_gpus import FakeGpus
from harness.gpu_pairs import GpuPair, NcclBuffers, open_gpu_pair, open_nccl_buffers
from harness.link_pairs import name_of
from harness.raw_inserts import RawInsert

needs_sockets = pytest.mark.skipif(
    not has_fd_sockets(), reason="no sockets for handles"
)

OF_BOTH = pytest.mark.parametrize("is_layer", [False, True], ids=["entry", "layer"])


@pytest.fixture
async def pair(gpus: FakeGpus) -> AsyncIterator[GpuPair]:
    async with open_gpu_pair(gpus, reconnect_s=0) as pair:
        yield pair


async def begin(pair: GpuPair, *, is_layer: bool = False) -> tuple[RawInsert, int]:
    """Announce an entry, or one layer of it, and wait until it may be read."""
    raw = RawInsert(pair.peer._linked(), MIB, streaming=is_layer)
    if is_layer:
        await raw.granted()
        return raw, await push(raw, pair)
    assert await raw.hearer.next() == (Grant(raw.transfer, "cuda_ipc", "edges"), b"")
    return raw, raw.transfer


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


@needs_sockets
@OF_BOTH
async def test_what_is_to_be_read_is_not_sent(pair: GpuPair, is_layer: bool) -> None:
    raw, transfer = await begin(pair, is_layer=is_layer)
    raw.stream.send(Sent(transfer, 0, b"", "edges", "nccl"))
    assert "not asked for" in await refusal(pair)


@needs_sockets
async def test_what_is_to_be_sent_is_not_shown(two_gpus: FakeGpus) -> None:
    async with open_nccl_buffers(two_gpus, reconnect_s=0) as pair:
        await pair.opened()
        link = pair.peer._linked()
        raw = RawInsert(link, MIB, on_gpu=True)
        assert await raw.hearer.next() == (Grant(raw.transfer, "nccl", "full"), b"")
        raw.stream.send(Sent(raw.transfer, 0, b"", "full", "cuda_ipc", 0))
        await until(lambda: not link.is_open)
        assert "not asked for" in str(link.error)


@needs_sockets
async def test_what_lies_beyond_the_memory_breaks_the_link(pair: GpuPair) -> None:
    raw, _ = await begin(pair)
    raw.stream.send(Sent(raw.transfer, 0, b"d" * 16, "edges", "cuda_ipc", 16 * MIB))
    assert "beyond" in await refusal(pair)
    await until(lambda: not pair.buffer.statistics().used_bytes)


@needs_sockets
@OF_BOTH
async def test_what_lies_elsewhere_is_granted_for_lanes_and_shown_no_more(
    pair: GpuPair, is_layer: bool
) -> None:
    raw, transfer = await begin(pair, is_layer=is_layer)
    raw.stream.send(Sent(transfer, 0, b"", "off", "cuda_ipc"))
    await raw.granted(transfer)
    raw.stream.send(Sent(transfer, 0, b"", "edges", "cuda_ipc", 0))  # late
    raw.stream.send(Cancel())
    await raw.last()


@needs_sockets
async def test_a_layer_that_is_taken_back_is_let_go_when_nothing_reads_it(
    pair: GpuPair,
) -> None:
    raw, transfer = await begin(pair, is_layer=True)
    raw.stream.send(Retract(transfer))
    assert await raw.hearer.next() == (Retract(transfer), b"")
    raw.stream.send(Sent(transfer, 0))
    assert await push(raw, pair) > transfer
    raw.stream.send(Cancel())
    await raw.last()


@needs_sockets
async def test_other_bytes_than_were_shown_are_refused(pair: GpuPair) -> None:
    raw, _ = await begin(pair)
    raw.stream.send(Sent(raw.transfer, 0, b"of other bytes..", "edges", "cuda_ipc", 0))
    last = await raw.last()
    assert isinstance(last, Failure) and last.code == "ChecksumError"
    assert Grant(raw.transfer) not in [frame for frame, _ in raw.hearer.frames]
    await until(lambda: not pair.buffer.statistics().used_bytes)


@needs_sockets
@pytest.mark.parametrize("after", ["a small part", "a large part", "nothing to read"])
async def test_a_peer_that_falls_silent_after_some_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, pair: GpuPair, after: str
) -> None:
    monkeypatch.setattr(progress, "STALL_S", 0.1)
    staging = pair.peer.routes.staging(pair.peer._linked(), MIB)
    assert staging is not None
    staged = await staging.staged(noise(MIB))
    assert staged is not None
    raw = RawInsert(pair.peer._linked(), MIB, 8)
    assert await raw.hearer.next() == (Grant(raw.transfer, "cuda_ipc", "edges"), b"")
    if after == "a small part":
        little = bytes(8)
        raw.stream.send(Eager(raw.transfer, (1,), (digest_of(little),)), little)
    elif after == "a large part":
        whole = digest_of(bytes_of(noise(MIB)))
        place = staged.region.start
        raw.stream.send(Sent(raw.transfer, 0, whole, "full", "cuda_ipc", place))
    else:
        raw.stream.send(Sent(raw.transfer, 0, b"", "off", "cuda_ipc"))
    async with asyncio.timeout(10):
        assert "stood still" in await refusal(pair)
    await until(lambda: not pair.buffer.statistics().used_bytes)
    staged.release()


KEY, LITTLE = bytes_of(noise(MIB, 1)), bytes(range(8))
DIGEST = digest_of(KEY)


async def begin_on_gpu(pair: NcclBuffers) -> RawInsert:
    """Ask for a large tensor and a small one, and wait for memory of the GPU."""
    raw = RawInsert(pair.peer._linked(), MIB, 8, on_gpu=True)
    assert await raw.hearer.next() == (Grant(raw.transfer, "nccl", "full"), b"")
    return raw


def send(pair: NcclBuffers, raw: RawInsert, digest: bytes = DIGEST) -> None:
    """Send the large tensor from GPU to GPU."""
    pool = pair.peer.pool
    assert isinstance(pool, CopyPool)
    memory = pool.memory_of(pair.theirs.tensor(noise(MIB, 1)))
    place = dataclasses.replace(memory, ready=None)
    pair.near_way.transport.send(raw.transfer, 0, place, lambda *_: None)
    raw.stream.send(Sent(raw.transfer, 0, digest, "full", "nccl"))


def ride(raw: RawInsert, digest: bytes | None = None) -> None:
    digests = (digest_of(LITTLE) if digest is None else digest,)
    raw.stream.send(Eager(raw.transfer, (1,), digests), LITTLE)


async def check_is_in(pair: NcclBuffers, raw: RawInsert) -> None:
    assert await raw.last() == Accepted()
    entry = await pair.buffer.drop_select()
    assert isinstance(entry.key, dict) and is_same(entry.key["0"], noise(MIB, 1))
    assert bytes(entry.key["1"].tolist()) == LITTLE


async def test_what_rides_may_come_last(two_gpus: FakeGpus) -> None:
    async with open_nccl_buffers(two_gpus) as pair:
        await pair.opened()
        raw = await begin_on_gpu(pair)
        send(pair, raw)
        (entry,) = pair.buffer.ledger.table.entries.values()
        await until(lambda: entry.landed == [0])
        ride(raw)
        await check_is_in(pair, raw)


@pytest.mark.parametrize("rides_first", [True, False])
async def test_what_rides_comes_once_though_the_way_is_lost(
    two_gpus: FakeGpus, rides_first: bool
) -> None:
    async with open_nccl_buffers(two_gpus) as pair:
        await pair.opened()
        raw = await begin_on_gpu(pair)
        if rides_first:
            ride(raw)
        pair.way._stalled(PeerLost("nothing has come for long"))
        raw.stream.send(Sent(raw.transfer, 0, DIGEST, "full", "nccl"))  # late
        if not rides_first:
            ride(raw)
        assert await raw.hearer.next() == (Grant(raw.transfer), b"")
        link = pair.peer._linked()
        link.payload.send(raw.transfer, 0, KEY, lambda *_: None)
        raw.stream.send(Sent(raw.transfer, 0, DIGEST))
        await check_is_in(pair, raw)


@pytest.mark.parametrize("is_small", [True, False])
async def test_other_bytes_than_were_sent_are_refused(
    two_gpus: FakeGpus, is_small: bool
) -> None:
    async with open_nccl_buffers(two_gpus) as pair:
        await pair.opened()
        raw = await begin_on_gpu(pair)
        send(pair, raw, DIGEST if is_small else b"x" * 16)
        ride(raw, b"x" * 16 if is_small else None)
        last = await raw.last()
        assert isinstance(last, Failure) and last.code == "ChecksumError"
        await until(lambda: not pair.buffer.statistics().used_bytes)


async def test_what_comes_by_gpu_does_not_come_by_a_lane(two_gpus: FakeGpus) -> None:
    async with open_nccl_buffers(two_gpus, reconnect_s=0) as pair:
        await pair.opened()
        raw = await begin_on_gpu(pair)
        raw.stream.send(Sent(raw.transfer, 0, DIGEST))
        link = pair.peer._linked()
        await until(lambda: not link.is_open)
        assert "makes no sense" in str(link.error)


async def test_of_what_was_not_asked_for_nothing_is_sent_by_gpu(
    local: LookupBuffer,
) -> None:
    async with serve("mem://", lookup=local) as server:
        link = await dial(server.url, identity=name_of("producer"))
        raw = RawInsert(link, MIB)
        await raw.granted()
        raw.stream.send(Sent(raw.transfer, 0, b"", "off", "nccl"))
        await until(lambda: not link.is_open)
        assert "not asked for" in str(link.error)
        await link.aclose()
