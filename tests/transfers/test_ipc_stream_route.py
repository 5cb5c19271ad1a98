from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from asynckv.devices.copying import CopyPool
from asynckv.devices.cuda import DeviceMemory
from asynckv.errors import ChecksumError, RemoteProtocolError
from asynckv.links.fd_socket import has_fd_sockets
from asynckv.protocol.transfer_frames import Sent
from asynckv.protocol.values import Place
from asynckv.sharing.imports import ImportedMemory
from asynckv.shielding import wait_shielded
from asynckv.testing.blocked import cancel_before_each, until
from asynckv.testing.lookup_checks.values import MIB, noise
from asynckv.transfers.readers import IpcStreamRoute, ShownParts
from harness.fake_gpus import FakeGpus
from harness.gpu_pairs import GpuPair, open_gpu_pair

pytestmark = pytest.mark.skipif(not has_fd_sockets(), reason="no sockets for handles")

PLACE = Place(((0, MIB),), 0, 1)


class Ground:
    """Parts of an offer that nobody has made, and what is told of them."""

    def __init__(self, pair: GpuPair) -> None:
        link = pair.peer._linked()
        memory, pool = pair.peer._imports.of(link), pair.peer.pool
        assert isinstance(memory, ImportedMemory) and isinstance(pool, CopyPool)
        (importer,) = pair.buffer.exporter._importers
        pin = memory.take(importer.pin([]).number)
        places, sizes = (PLACE, None, PLACE), (MIB, 8, MIB)
        self.pair = pair
        self.memory = memory
        self.parts = ShownParts(places, sizes, b"", pin, memory, pool)
        self.arrivals = IpcStreamRoute(link, self.parts)
        self.progress = link.progress
        self.told: list[tuple[bytes, BaseException | None]] = []

    def place(self) -> DeviceMemory:
        """Return memory of the peer's own GPU."""
        tensor = self.pair.theirs.tensor(noise(MIB))
        place = self.parts.pool.memory_of(tensor)
        if place.ready is not None:
            place.ready.close()
        return DeviceMemory(place.address, place.nbytes, place.device, tensor)

    def receive(self, *parts: int) -> None:
        for part in parts:
            self.arrivals.receive(
                2, part, self.place(), lambda *told: self.told.append(told)
            )


@pytest.fixture
async def ground(gpus: FakeGpus) -> AsyncIterator[Ground]:
    async with open_gpu_pair(gpus) as pair:
        ground = Ground(pair)
        yield ground
        await ground.arrivals.quiesce(2)
        await until(lambda: not ground.memory.pins)


async def test_a_part_is_read_once_it_is_there(ground: Ground) -> None:
    ground.receive(0, 2)
    ground.arrivals.sent(Sent(2, 2, b"digest", "edges", "cuda_ipc"))
    await until(lambda: len(ground.told) == 1)
    digest, error = ground.told[0]
    assert digest and isinstance(error, ChecksumError) and ground.memory.pins == 1
    ground.arrivals.sent(Sent(2, 0, b"digest", "edges", "cuda_ipc"))
    assert ground.parts.pin is None  # what is copied just now keeps the memory
    await until(lambda: len(ground.told) == 2)
    await until(lambda: not ground.memory.pins)


async def test_a_copy_that_takes_its_time_is_not_the_peers_delay(
    ground: Ground, monkeypatch: pytest.MonkeyPatch
) -> None:
    works, copy, progress = asyncio.Event(), ground.parts.pool.copy, ground.progress

    async def slow(*places: object, digest: bool = True) -> list[bytes]:
        await works.wait()
        return await copy(*places, digest=digest)  # type: ignore[arg-type]

    monkeypatch.setattr(ground.parts.pool, "copy", slow)
    ground.receive(0)
    progress.expect(2)
    now_s = asyncio.get_running_loop().time()
    assert progress._is_owed(now_s)
    ground.arrivals.sent(Sent(2, 0, b"digest", "edges", "cuda_ipc"))
    await until(lambda: not progress._is_owed(now_s))
    works.set()
    await until(lambda: len(ground.told) == 1)
    assert progress._is_owed(now_s)
    progress.forget(2)


@pytest.mark.parametrize("order", [1, -1])
async def test_all_copies_are_waited_for_however_often_the_wait_is_cancelled(
    ground: Ground, monkeypatch: pytest.MonkeyPatch, order: int
) -> None:
    copying = list[asyncio.Future[None]]()

    async def copy(*anything: object, **options: object) -> list[bytes]:
        copying.append(asyncio.get_running_loop().create_future())
        await wait_shielded(copying[-1])
        return [b""]

    monkeypatch.setattr(ground.parts.pool, "copy", copy)
    ground.receive(0, 2)
    for part in (0, 2):
        ground.arrivals.sent(Sent(2, part, b"digest", "edges", "cuda_ipc"))
    await until(lambda: len(copying) == 2)
    quiescing = asyncio.create_task(ground.arrivals.quiesce(2))
    await cancel_before_each(quiescing, copying[::order])
    assert quiescing.cancelled() and not ground.arrivals._reading


async def test_what_makes_no_sense_is_refused(ground: Ground) -> None:
    with pytest.raises(TypeError, match="memory of the host"):
        ground.arrivals.receive(2, 0, memoryview(b""), lambda *told: None)
    ground.receive(0)
    for part in (2, 9):
        with pytest.raises(RemoteProtocolError, match="makes no sense"):
            ground.arrivals.sent(Sent(2, part, route="cuda_ipc"))
    with pytest.raises(RemoteProtocolError, match="digests of off, not of edges"):
        ground.arrivals.sent(Sent(2, 0, b"", "off", "cuda_ipc"))
    with pytest.raises(RemoteProtocolError, match="granted otherwise"):
        ground.arrivals.sent(Sent(2, 0, b"", "edges", "cuda_ipc", 0))
    with pytest.raises(RemoteProtocolError, match="sent by nccl, granted otherwise"):
        ground.arrivals.sent(Sent(2, 0, b"", "edges", "nccl"))
    assert not ground.arrivals.landed_bytes(2)
    with pytest.raises(ValueError, match="does not lie there"):
        ground.parts.source(1)


async def test_what_is_told_too_late_is_of_no_interest(ground: Ground) -> None:
    ground.receive(0, 2)
    ground.arrivals.sent(Sent(2, 0, b"", "full", "cuda_ipc"))
    ground.arrivals.stop(2)
    ground.arrivals.sent(Sent(2, 2, b"", "full", "cuda_ipc"))
    await ground.arrivals.quiesce(2)
    assert not ground.told and not ground.arrivals._reading
    with pytest.raises(ValueError, match="was let go"):
        ground.parts.source(0)
