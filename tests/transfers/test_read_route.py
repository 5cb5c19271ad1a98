"""What a peer says of parts that lie in its memory of a GPU, and what is read there."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import numpy
import pytest

from asynckv.devices.cuda import DeviceMemory
from asynckv.errors import ChecksumError, RemoteProtocolError
from asynckv.links.progress import Progress
from asynckv.protocol.handshake import DigestMode
from asynckv.protocol.transfer_frames import Sent
from asynckv.sharing.gpu_channel import RouteLost, other_bytes
from asynckv.shielding import wait_shielded
from asynckv.tensors.runs import runs_in
from asynckv.testing.blocked import cancel_before_each, until
from asynckv.transfers.read_route import IpcRoute, MapRoute

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


async def test_other_bytes_than_lie_there_lose_no_route() -> None:
    async def read(target: memoryview) -> None:
        raise other_bytes(0)

    transfer = HostTransfer(read)
    _, error = await transfer.outcome()
    assert isinstance(error, ChecksumError) and not transfer.lost


async def test_what_cannot_be_read_in_the_peers_host_loses_the_route() -> None:
    async def read(target: memoryview) -> None:
        raise OSError("gone")

    transfer = HostTransfer(read)
    _, error = await transfer.outcome()
    assert isinstance(error, RouteLost) and "gone" in str(error)
    assert [str(one) for one in transfer.lost] == ["gone"]


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
