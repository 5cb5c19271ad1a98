"""What a peer may say of parts that it was granted memory of a GPU for, or was not."""

from __future__ import annotations

import dataclasses

import pytest

from asynckv.buffers.lookup import LookupBuffer
from asynckv.buffers.serve import serve
from asynckv.devices.copying import CopyPool
from asynckv.errors import PeerLost
from asynckv.links.dial import dial
from asynckv.protocol.frames import Accepted, Failure
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
from harness.link_pairs import name_of
from harness.nccl_buffer_pairs import NcclBuffers, open_nccl_buffers
from harness.raw_inserts import RawInsert

KEY, LITTLE = bytes_of(noise(MIB, 1)), bytes(range(8))
DIGEST = digest_of(KEY)


async def begin(pair: NcclBuffers) -> RawInsert:
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
        raw = await begin(pair)
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
        raw = await begin(pair)
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
        raw = await begin(pair)
        send(pair, raw, DIGEST if is_small else b"x" * 16)
        ride(raw, b"x" * 16 if is_small else None)
        last = await raw.last()
        assert isinstance(last, Failure) and last.code == "ChecksumError"
        await until(lambda: not pair.buffer.statistics().used_bytes)


async def test_what_comes_by_gpu_does_not_come_by_a_lane(two_gpus: FakeGpus) -> None:
    async with open_nccl_buffers(two_gpus, reconnect_s=0) as pair:
        await pair.opened()
        raw = await begin(pair)
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
