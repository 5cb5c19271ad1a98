"""Digests of what goes from GPU to GPU."""

from __future__ import annotations

import asyncio

import pytest
import torch

from asynckv.buffers.serving.select import SentOffer
from asynckv.devices.arena import DeviceRegion
from asynckv.devices.copying import CopyPool
from asynckv.devices.cuda import DeviceMemory
from asynckv.errors import ChecksumError, GPUFailed, PeerLost, RemoteProtocolError
from asynckv.links.options import Digest
from asynckv.protocol.transfer_frames import Grant, Sent
from asynckv.sharing.gpu_channel import NcclRoute, RouteLost
from asynckv.testing.blocked import cancel_before_each, until
from asynckv.testing.expectations import is_same
from asynckv.testing.lookup_checks.values import MIB, noise
from asynckv.waits.waiting import wait_shielded
from harness.fake_gpus import FakeGpus
from harness.gpu_pairs import NcclBuffers, open_nccl_buffers


async def take(pair: NcclBuffers) -> None:
    await pair.buffer.insert([1], None, noise(MIB), None, None)
    entry = await pair.peer.lookup.drop_select([1])
    assert is_same(entry.key, noise(MIB))  # type: ignore[arg-type]


def route_in(pair: NcclBuffers) -> tuple[NcclRoute, DeviceMemory]:
    """Return what receives by NCCL, and memory of the peer's GPU."""
    assert isinstance(pair.peer.pool, CopyPool)
    place = pair.peer.pool.memory_of(pair.theirs.tensor(noise(8)))
    return NcclRoute(pair.near_way, pair.peer.pool), place


@pytest.mark.parametrize(
    ("ours", "theirs", "kind"),
    [
        ("auto", "auto", "full"),
        ("edges", "edges", "edges"),
        ("off", "edges", "edges"),
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
    async with open_nccl_buffers(two_gpus, serves=ours, digest=theirs) as pair:
        await take(pair)
    assert [frame.kind for frame in sent_devices] == [kind]
    assert bool(sent_devices[0].digest) is (kind != "off")


async def test_a_part_without_a_digest_gets_one(
    two_gpus: FakeGpus, sent_devices: list[Sent]
) -> None:
    async with open_nccl_buffers(two_gpus, digest="full") as pair:
        await pair.buffer.insert([1], None, noise(MIB), None, None)
        (entry,) = pair.buffer.ledger.table.entries.values()
        entry.parts[0].digest = b""
        found = await pair.peer.lookup.drop_select([1])
        assert is_same(found.key, noise(MIB))  # type: ignore[arg-type]
    assert sent_devices[0].kind == "full" and sent_devices[0].digest


async def test_a_part_that_cannot_be_digested_is_not_given(
    two_gpus: FakeGpus,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def fail(*anything: object) -> list[bytes]:
        raise GPUFailed("it has fallen off the bus")

    async with open_nccl_buffers(two_gpus, digest="full") as pair:
        await pair.buffer.insert([1], None, noise(MIB), None, None)
        (entry,) = pair.buffer.ledger.table.entries.values()
        entry.parts[0].digest = b""
        monkeypatch.setattr(CopyPool, "digest", fail)
        with pytest.raises(GPUFailed, match="off the bus"):
            await pair.peer.lookup.drop_select([1])
    caplog.clear()  # whose traceback keeps the memory


async def test_what_cannot_be_compared_is_not_handed_out(
    two_gpus: FakeGpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*anything: object) -> list[bytes]:
        raise GPUFailed("it has fallen off the bus")

    async with open_nccl_buffers(two_gpus) as pair:
        monkeypatch.setattr(CopyPool, "digest", fail)
        with pytest.raises(GPUFailed, match="off the bus"):
            await take(pair)
        await until(lambda: not pair.buffer.statistics().leased)


@pytest.mark.parametrize("digest", ["auto", "edges"])
async def test_other_bytes_than_were_inserted_are_noticed(
    two_gpus: FakeGpus, digest: Digest
) -> None:
    async with open_nccl_buffers(two_gpus, serves=digest, digest=digest) as pair:
        await pair.buffer.insert([1], None, noise(MIB), None, None)
        (entry,) = pair.buffer.ledger.table.entries.values()
        region = entry.regions[0]
        assert isinstance(region, DeviceRegion)
        region.edges = entry.parts[0].digest = b"another digest.."
        with pytest.raises(ChecksumError):
            await pair.peer.lookup.drop_select([1])


@pytest.mark.parametrize("order", [1, -1])
async def test_all_digests_are_waited_for_however_often_the_wait_is_cancelled(
    two_gpus: FakeGpus, monkeypatch: pytest.MonkeyPatch, order: int
) -> None:
    reading = list[asyncio.Future[None]]()

    async def digest(*anything: object) -> list[bytes]:
        reading.append(asyncio.get_running_loop().create_future())
        await wait_shielded(reading[-1])
        return [b""]

    async with open_nccl_buffers(two_gpus, digest="full") as pair:
        arrivals, place = route_in(pair)
        monkeypatch.setattr(pair.peer.pool, "digest", digest)
        transport = pair.near_way.transport
        monkeypatch.setattr(transport, "receive", lambda *_: _[-1](b"", None))
        for part in range(2):
            arrivals.receive(1, part, place, lambda digest, error: None)
            arrivals.sent(Sent(1, part, b"", "full", "nccl"))
        await until(lambda: len(reading) == 2)
        quiescing = asyncio.create_task(arrivals.quiesce(1))
        await cancel_before_each(quiescing, reading[::order])
        assert quiescing.cancelled() and not arrivals._comparing


async def test_what_makes_no_sense_is_refused(two_gpus: FakeGpus) -> None:
    async with open_nccl_buffers(two_gpus, digest="full") as pair:
        arrivals, place = route_in(pair)
        with pytest.raises(TypeError, match="memory of the host"):
            arrivals.receive(1, 0, memoryview(b""), lambda digest, error: None)
        with pytest.raises(RemoteProtocolError, match="makes no sense"):
            arrivals.sent(Sent(1, 0, b"", "full", "nccl"))
        arrivals.receive(1, 0, place, lambda digest, error: None)
        with pytest.raises(RemoteProtocolError, match="digests of edges"):
            arrivals.sent(Sent(1, 0, b"", "edges", "nccl"))
        with pytest.raises(RemoteProtocolError, match="granted otherwise"):
            arrivals.sent(Sent(1, 0, b"", "full", "cuda_ipc", 0))
        await arrivals.quiesce(1)
        arrivals.sent(Sent(1, 0, b"", "full", "nccl"))  # late, and of no interest


async def test_a_digest_that_takes_its_time_is_not_the_peers_delay(
    two_gpus: FakeGpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    works, digest = asyncio.Event(), CopyPool.digest

    async def slow(pool: CopyPool, places: list[torch.Tensor]) -> list[bytes]:
        if pool is pair.peer.pool:
            await works.wait()
        return await digest(pool, places)

    async with open_nccl_buffers(two_gpus) as pair:
        await pair.opened()
        monkeypatch.setattr(CopyPool, "digest", slow)
        task = asyncio.create_task(take(pair))
        progress = pair.near_way.progress
        await until(lambda: bool(progress._working))
        (transfer,) = progress._transfers
        assert not progress._is_owed(asyncio.get_running_loop().time())
        works.set()
        await task
        assert transfer not in progress._transfers and not progress._working


async def test_a_part_that_nobody_asked_for_ends_the_link(
    two_gpus: FakeGpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lie(offering: SentOffer, frame: Grant, *anything: object) -> None:
        offering.stream.send(Sent(frame.transfer, 0, b"", "off", "nccl"))

    monkeypatch.setattr(SentOffer, "on_grant", lie)
    async with open_nccl_buffers(
        two_gpus, url="?payload=inline", reconnect_s=0
    ) as pair:
        with pytest.raises(PeerLost):
            await take(pair)


async def test_what_is_being_compared_ends_with_its_select(
    two_gpus: FakeGpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    comparing = list[asyncio.Task[None] | None]()

    async def wait(*anything: object) -> list[bytes]:
        comparing.append(asyncio.current_task())
        await asyncio.get_running_loop().create_future()
        raise AssertionError

    async with open_nccl_buffers(two_gpus) as pair:
        with monkeypatch.context() as patch:
            patch.setattr(CopyPool, "digest", wait)
            await pair.buffer.insert([1], None, noise(MIB), None, None)
            into = {"key": pair.theirs.tensor(noise(MIB))}
            lookup = pair.peer.lookup
            taking = asyncio.create_task(lookup.drop_select([1], into=into))
            await until(lambda: bool(comparing))
            taking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await taking
            assert comparing[0] is not None and comparing[0].done()
        await until(lambda: not pair.buffer.statistics().leased)
        entry = await pair.peer.lookup.drop_select([1])
        assert is_same(entry.key, noise(MIB))  # type: ignore[arg-type]


async def test_what_cannot_come_any_more_is_told(two_gpus: FakeGpus) -> None:
    async with open_nccl_buffers(two_gpus) as pair:
        told: list[BaseException | None] = []
        arrivals, place = route_in(pair)
        arrivals.gpus.transport.abort()
        arrivals.receive(1, 0, place, lambda digest, error: told.append(error))
        await until(lambda: bool(told))
        assert isinstance(told[0], RouteLost)
        arrivals.stop(1)


async def test_a_part_that_has_come_is_not_lost_with_the_way(
    two_gpus: FakeGpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_nccl_buffers(two_gpus, digest="full") as pair:
        told: list[BaseException | None] = []
        arrivals, place = route_in(pair)
        transport = pair.near_way.transport
        monkeypatch.setattr(transport, "receive", lambda *_: _[-1](b"", None))
        arrivals.receive(1, 0, place, lambda digest, error: told.append(error))
        arrivals.sent(Sent(1, 0, b"", "full", "nccl"))
        arrivals.fail(RouteLost(PeerLost("gone")))
        await until(lambda: bool(told))
        assert isinstance(told[0], ChecksumError) and not arrivals.is_awaited
        await arrivals.quiesce(1)
