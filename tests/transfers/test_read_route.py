"""What a peer says of parts that lie in its memory of a GPU, and what is read there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import numpy
import pytest

from asynckv.devices.copying import CopyPool
from asynckv.devices.cuda import DeviceMemory
from asynckv.errors import ChecksumError, RemoteProtocolError
from asynckv.links.fd_socket import has_fd_sockets
from asynckv.links.link import Progress
from asynckv.protocol.handshake import DigestMode
from asynckv.protocol.transfer_frames import Sent
from asynckv.protocol.values import Place
from asynckv.sharing.gpu_channel import RouteLost, other_bytes
from asynckv.sharing.imports import ImportedMemory
from asynckv.tensors.runs import runs_in
from asynckv.testing.blocked import cancel_before_each, until
from asynckv.testing.lookup_checks.values import MIB, noise
from asynckv.transfers.read_route import IpcRoute, MapRoute
from asynckv.transfers.readers import ExportedParts, IpcStreamRoute
from asynckv.waits.waiting import wait_shielded
from harness.fake_gpus import FakeGpus
from harness.gpu_pairs import GpuPair, open_gpu_pair

needs_sockets = pytest.mark.skipif(
    not has_fd_sockets(), reason="no sockets for handles"
)

TARGET = DeviceMemory(4096, 100, 0)
WHOLE, EDGES = b"of all bytes", b"of the edges"


class Memory:
    """In place of what is open of a peer's: copies at once, or never."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.is_stuck = False
        self.beyond = 1000

    def check(self, offset: int, nbytes: int) -> None:
        if offset + nbytes > self.beyond:
            raise RemoteProtocolError("beyond")

    def read(
        self,
        offset: int,
        target: DeviceMemory,
        copy: Callable[[DeviceMemory, DeviceMemory], Awaitable[None]],
        done: Callable[[Exception | None], None],
    ) -> asyncio.Task[None]:
        async def work() -> None:
            try:
                if self.is_stuck:
                    await asyncio.Event().wait()
                if self.error is not None:
                    raise self.error
                await copy(DeviceMemory(offset, target.nbytes, 0), target)
            except Exception as exc:  # noqa: BLE001 - whoever waits for it is told
                done(exc)
            else:
                done(None)

        return asyncio.get_running_loop().create_task(work())


class Pool:
    """In place of one: knows digests, and whether that of all bytes was asked for."""

    def __init__(self) -> None:
        self.digested = list[bool]()
        self.works = asyncio.Event()
        self.works.set()

    async def copy(self, sources: Any, targets: Any, *, digest: bool) -> list[bytes]:
        await self.works.wait()
        self.digested.append(digest)
        return [WHOLE if digest else b""]

    async def edges(self, places: Any) -> list[bytes]:
        return [EDGES]


class Payload:
    """In place of the link's own: nothing lands by it."""

    def landed_bytes(self, transfer: int) -> int:
        return 0


def refuse(error: Exception) -> None:
    raise error


class Transfer:
    """One transfer of one part, and what was told of it."""

    def __init__(
        self,
        digest: DigestMode = "edges",
        *,
        is_kept: bool = True,
        before: Sent | None = None,
    ) -> None:
        self.memory, self.pool = Memory(), Pool()
        self.progress = Progress(Payload(), refuse)  # type: ignore[arg-type]
        self.arrivals = IpcRoute(
            self.memory,  # type: ignore[arg-type]
            self.pool,  # type: ignore[arg-type]
            self.progress,
            digest,
            is_kept=is_kept,
            told=before,
        )
        self.told = asyncio.get_running_loop().create_future()
        self.arrivals.receive(1, 0, TARGET, self._done)

    def _done(self, digest: bytes, error: BaseException | None) -> None:
        self.told.set_result((digest, error))

    async def end(self) -> BaseException | None:
        digest, error = await self.told
        assert not digest
        return error  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("asked", "kind", "digest"),
    [
        ("edges", "edges", EDGES),
        ("edges", "full", WHOLE),
        ("full", "full", WHOLE),
        ("off", "edges", EDGES),
        ("off", "off", b""),
    ],
)
@pytest.mark.parametrize("is_kept", [True, False])
async def test_what_is_kept_has_the_digest_of_all_bytes_whatever_is_compared(
    asked: DigestMode, kind: DigestMode, digest: bytes, is_kept: bool
) -> None:
    transfer = Transfer(asked, is_kept=is_kept)
    assert transfer.arrivals.digest == asked
    transfer.arrivals.sent(Sent(1, 0, digest, kind, "cuda_ipc", 64))
    assert await transfer.told == (WHOLE if is_kept else b"", None)
    assert transfer.pool.digested == [is_kept or kind == "full"]
    assert transfer.progress._noted_bytes == TARGET.nbytes
    assert not transfer.arrivals.landed_bytes(1)


async def test_what_the_peer_has_told_before_is_read_at_once_and_not_granted() -> None:
    told = Sent(0, 0, EDGES, "edges", offset=64)
    transfer = Transfer(is_kept=False, before=told)
    assert transfer.arrivals.grant(1) is None
    assert await transfer.told == (b"", None)
    with pytest.raises(RemoteProtocolError, match="part 0"):
        transfer.arrivals.sent(Sent(1, 0, EDGES, "edges", "cuda_ipc", 64))


@pytest.mark.parametrize("kind", ["edges", "full"])
async def test_other_bytes_than_were_shown_are_told(kind: DigestMode) -> None:
    transfer = Transfer()
    transfer.arrivals.sent(Sent(1, 0, b"of other bytes", kind, "cuda_ipc", 64))
    assert isinstance(await transfer.end(), ChecksumError)


async def test_a_part_that_the_peer_has_elsewhere_is_lost() -> None:
    transfer = Transfer("full")
    transfer.arrivals.sent(Sent(1, 0, b"", "off", "cuda_ipc"))
    error = await transfer.end()
    assert isinstance(error, RouteLost)


async def test_what_cannot_be_read_is_lost() -> None:
    transfer = Transfer()
    transfer.memory.error = OSError("gone")
    transfer.arrivals.sent(Sent(1, 0, EDGES, "edges", "cuda_ipc", 64))
    error = await transfer.end()
    assert isinstance(error, RouteLost) and "gone" in str(error)


@pytest.mark.parametrize(
    ("frame", "reason"),
    [
        (Sent(1, 1, EDGES, "edges", "cuda_ipc", 64), "part 1"),
        (Sent(1, 0, b"", "off", "cuda_ipc", 64), "digests of off"),
        (Sent(1, 0, EDGES, "edges", "cuda_ipc", 901), "beyond"),
    ],
)
async def test_what_makes_no_sense_breaks_the_link(frame: Sent, reason: str) -> None:
    transfer = Transfer()
    with pytest.raises(RemoteProtocolError, match=reason):
        transfer.arrivals.sent(frame)


async def test_a_part_is_shown_once() -> None:
    transfer, frame = Transfer(), Sent(1, 0, EDGES, "edges", "cuda_ipc", 64)
    transfer.arrivals.sent(frame)
    with pytest.raises(RemoteProtocolError, match="part 0"):
        transfer.arrivals.sent(frame)
    await transfer.told


async def test_what_is_stopped_is_not_read_and_nothing_is_told() -> None:
    transfer = Transfer()
    transfer.memory.is_stuck = True
    transfer.arrivals.sent(Sent(1, 0, EDGES, "edges", "cuda_ipc", 64))
    await asyncio.sleep(0)
    await transfer.arrivals.quiesce(1)
    assert not transfer.told.done() and not transfer.arrivals._reading
    transfer.arrivals.sent(Sent(1, 0, EDGES, "edges", "cuda_ipc", 64))


@pytest.mark.parametrize("order", [1, -1])
async def test_all_reads_are_waited_for_however_often_the_wait_is_cancelled(
    monkeypatch: pytest.MonkeyPatch, order: int
) -> None:
    transfer, reading = Transfer(), list[asyncio.Future[None]]()

    async def copy(*anything: object, **options: object) -> list[bytes]:
        reading.append(asyncio.get_running_loop().create_future())
        await wait_shielded(reading[-1])
        return [WHOLE]

    monkeypatch.setattr(transfer.pool, "copy", copy)
    transfer.arrivals.receive(1, 1, TARGET, lambda *_: None)
    for part in range(2):
        transfer.arrivals.sent(Sent(1, part, EDGES, "edges", "cuda_ipc", 64))
    await until(lambda: len(reading) == 2)
    quiescing = asyncio.create_task(transfer.arrivals.quiesce(1))
    await cancel_before_each(quiescing, reading[::order])
    assert quiescing.cancelled() and not transfer.arrivals._reading


class HostTransfer:
    """One tensor that lies in a file of the peer's, which ``read`` copies."""

    def __init__(self, read: Callable[[memoryview], Awaitable[None]]) -> None:
        self.lost = list[Exception]()
        self.target = memoryview(bytearray(4))
        progress = Progress(Payload(), refuse)  # type: ignore[arg-type]
        told = Sent(0, 0, route="cuda_ipc")
        self.route = MapRoute(read, self.lost.append, progress, "off", told)
        self.told = asyncio.get_running_loop().create_future()

    async def outcome(self) -> tuple[bytes, BaseException | None]:
        """Receive it, and return what is told."""
        self.route.receive(
            *(1, 0, self.target), lambda *told: self.told.set_result(told)
        )
        assert self.route.grant(1) is None
        return await self.told  # type: ignore[no-any-return]


async def test_a_tensor_of_the_peers_host_is_copied_where_it_belongs() -> None:
    async def read(target: memoryview) -> None:
        target[:] = b"part"

    transfer = HostTransfer(read)
    assert await transfer.outcome() == (b"", None)
    assert bytes(transfer.target) == b"part" and not transfer.lost


@pytest.mark.parametrize(
    ("error", "told", "lost"),
    [(other_bytes(0), ChecksumError, []), (OSError("gone"), RouteLost, ["gone"])],
)
async def test_only_what_cannot_be_read_in_the_peers_host_loses_the_route(
    error: Exception, told: type[Exception], lost: list[str]
) -> None:
    async def read(target: memoryview) -> None:
        raise error

    transfer = HostTransfer(read)
    _, found = await transfer.outcome()
    assert isinstance(found, told) and str(error) in str(found)
    assert [str(one) for one in transfer.lost] == lost


async def test_a_tensor_of_the_peers_host_comes_in_one_piece() -> None:
    async def read(target: memoryview) -> None:
        raise AssertionError("nothing is read")

    apart = runs_in(memoryview(bytearray(4)), numpy.array([0, 2]), 1)
    with pytest.raises(TypeError, match="one place"):
        HostTransfer(read).route.receive(1, 0, apart, lambda *_: None)


async def test_memory_of_the_host_does_not_come_this_way() -> None:
    transfer = Transfer()
    with pytest.raises(TypeError, match="memory of the host"):
        transfer.arrivals.receive(1, 1, memoryview(b""), lambda *_: None)


async def test_a_copy_that_takes_its_time_is_not_the_peers_delay() -> None:
    transfer = Transfer("off")
    transfer.progress.expect(1)
    transfer.pool.works.clear()
    transfer.arrivals.sent(Sent(1, 0, b"", "off", "cuda_ipc", 64))
    await until(lambda: not is_owed(transfer.progress))
    transfer.pool.works.set()
    await transfer.told
    assert is_owed(transfer.progress)
    transfer.progress.stop()


async def test_a_slow_copy_of_what_was_told_before_is_not_the_peers_delay() -> None:
    transfer = Transfer("off", is_kept=False, before=Sent(0, 0, b"", "off", offset=64))
    transfer.progress.expect(1)
    transfer.pool.works.clear()
    await until(lambda: bool(transfer.progress._working))
    assert not is_owed(transfer.progress)
    transfer.pool.works.set()
    await transfer.told
    transfer.progress.stop()


async def test_a_part_is_progress_once_it_was_copied() -> None:
    transfer = Transfer("off", is_kept=False)
    transfer.pool.works.clear()
    transfer.arrivals.sent(Sent(1, 0, b"", "off", "cuda_ipc", 64))
    await until(lambda: bool(transfer.progress._working))
    assert not transfer.progress._noted_bytes
    transfer.pool.works.set()
    await transfer.told
    assert transfer.progress._noted_bytes == TARGET.nbytes


def is_owed(progress: Progress) -> bool:
    """Would the watch blame the peer now?"""
    return progress._is_owed(asyncio.get_running_loop().time())


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
        self.parts = ExportedParts(places, sizes, b"", pin, memory, pool)
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


@needs_sockets
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


@needs_sockets
async def test_a_copy_of_a_shown_part_is_not_the_peers_delay(
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


@needs_sockets
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


@needs_sockets
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


@needs_sockets
async def test_what_is_told_too_late_is_of_no_interest(ground: Ground) -> None:
    ground.receive(0, 2)
    ground.arrivals.sent(Sent(2, 0, b"", "full", "cuda_ipc"))
    ground.arrivals.stop(2)
    ground.arrivals.sent(Sent(2, 2, b"", "full", "cuda_ipc"))
    await ground.arrivals.quiesce(2)
    assert not ground.told and not ground.arrivals._reading
    with pytest.raises(ValueError, match="was let go"):
        ground.parts.source(0)
