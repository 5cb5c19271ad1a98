"""Memory that both sides of a pipe share: read in place, refused, lost or changed."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
import torch

from asynckv.devices.cuda import DeviceMemory
from asynckv.errors import (
    ChecksumError,
    ConfigError,
    GPUFailed,
    PeerLost,
    PipeBroken,
)
from asynckv.links.fd_socket import has_fd_sockets
from asynckv.links.options import Digest
from asynckv.pipes import shared_memory as pipe_sharing
from asynckv.pipes.shared_memory import GpuSharing
from asynckv.protocol.frames import Failure
from asynckv.protocol.transfer_frames import Exposed, OpenMemory
from asynckv.sharing import exporter as sharing, imports as peer_memory
from asynckv.sharing.exporter import LEAST_NBYTES, Importer
from asynckv.sharing.handshake import Handshake
from asynckv.sharing.imports import Read
from asynckv.testing.blocked import until
from asynckv.testing.expectations import is_same, noise
from asynckv.testing.pipe_checks import (
    LARGE,
    receive_many,
    send_many,
)
from asynckv.transfers.read_route import IpcRoute
from asynckv.transfers.source import RegionSource, StagedTensor
from asynckv.types import TensorSpec
from harness.fake_gpus import FakeGpus
from harness.fake_gpus.cuda import FakeCuda
from harness.fake_gpus.gates import Gate
from harness.gpu_pipe_pairs import (
    IpcPipes,
    arenas_of,
    expect_by_host,
    gpu_side_of,
    open_ipc_pipes,
    used_bytes_of,
)
from harness.held_copies import held_copies, is_busy
from harness.link_pairs import Hearer

pytestmark = pytest.mark.skipif(not has_fd_sockets(), reason="no sockets for handles")


@pytest.fixture
async def pair(two_gpus: FakeGpus) -> AsyncIterator[IpcPipes]:
    async with open_ipc_pipes(two_gpus) as pair:
        yield pair


async def test_a_tensor_never_leaves_the_gpu(pair: IpcPipes) -> None:
    for source in (noise(LARGE, 1), pair.ours.tensor(noise(LARGE, 1))):
        await pair.near.send_tensor(source)
        found = await pair.far.recv_tensor()
        assert found is not None and found.device == torch.device("cuda", 0)
        assert is_same(found, noise(LARGE, 1))
    assert pair.moved == 2
    assert not pair.near._outbound._memory.arena.used_bytes


async def test_the_sender_keeps_nothing_that_the_receiver_has(pair: IpcPipes) -> None:
    await pair.near.send_tensor(pair.ours.tensor(noise(LARGE, 1)))
    await pair.near.flush()
    assert pair.used_bytes == LARGE  # the receiver's own
    found = await pair.far.recv_tensor()
    assert is_same(found, noise(LARGE, 1))
    del found
    await until(lambda: not pair.used_bytes)


BY_HOST = "goes through host memory"
ENDS = pytest.mark.parametrize("end", ["near_sharing", "far_sharing"])
SPEC = TensorSpec((LARGE,), "uint8")


def fail(*anything: object, **options: object) -> Any:
    raise GPUFailed("it has fallen off the bus")


class Held:
    """What the far side reads, until it is let go."""

    def __init__(self, pair: IpcPipes, monkeypatch: pytest.MonkeyPatch) -> None:
        self.has_begun, self._may_go_on = asyncio.Event(), asyncio.Event()
        self._read = pair.far_sharing.peer_memory.read
        monkeypatch.setattr(pair.far_sharing.peer_memory, "read", self._hold)

    def release(self) -> None:
        self._may_go_on.set()

    def _hold(
        self, offset: int, target: DeviceMemory, copy: Read, done: Any
    ) -> asyncio.Task[None]:
        async def held(*places: DeviceMemory) -> None:
            self.has_begun.set()
            await self._may_go_on.wait()
            await copy(*places)

        return self._read(offset, target, held, done)


@contextlib.asynccontextmanager
async def reading(gpus: FakeGpus) -> AsyncIterator[tuple[IpcPipes, Gate]]:
    """A pipe whose far side's GPU reads one tensor, until the gate is opened."""
    async with open_ipc_pipes(gpus) as pair:
        with held_copies(pair.theirs.process, have_begun=True) as gate:
            await pair.near.send_tensor(pair.ours.tensor(noise(LARGE, 1)))
            await until(lambda: is_busy(pair.theirs.process))
            yield pair, gate


# Where it cannot be opened.


@pytest.mark.parametrize("key", [1, 2], ids=["ours", "theirs"])
@pytest.mark.parametrize("call", ["export", "open_memory"])
async def test_what_cuda_refuses_is_no_way(
    two_gpus: FakeGpus,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    key: int,
    call: str,
) -> None:
    do = getattr(FakeCuda, call)

    def refuse(cuda: FakeCuda, *args: Any) -> Any:
        return fail() if cuda._process.key == key else do(cuda, *args)

    caplog.set_level("INFO")
    monkeypatch.setattr(FakeCuda, call, refuse)
    async with open_ipc_pipes(two_gpus, is_connected=False) as pair:
        await until(lambda: caplog.text.count(BY_HOST) == 2)
        await expect_by_host(pair)
        await expect_by_host(pair)
        await until(lambda: not (arenas_of(pair.ours) or arenas_of(pair.theirs)))
    assert caplog.text.count(BY_HOST) == 2
    assert not pair.opened


@pytest.mark.parametrize("answers", [[False], [True, False]])
async def test_memory_that_was_not_proved_is_not_read(
    two_gpus: FakeGpus,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    answers: list[bool],
) -> None:
    verify, left = Importer.verify, list(answers)

    def doubt(importer: Importer, nonce: bytes) -> bool:
        return verify(importer, nonce if left.pop(0) else b"another")

    caplog.set_level("INFO")
    monkeypatch.setattr(Importer, "verify", doubt)
    async with open_ipc_pipes(two_gpus, is_connected=False) as pair:
        await until(lambda: caplog.text.count(BY_HOST) == 2)
        await expect_by_host(pair)
    assert not (left or pair.opened)


def elsewhere(*_: object) -> None:
    raise ValueError("it is on another host")


@pytest.mark.parametrize(
    ("place", "name", "value", "reason"),
    [
        (pipe_sharing, "has_fd_sockets", lambda: False, "no memory is shared"),
        (pipe_sharing, "check_same_host", elsewhere, "another host"),
    ],
)
async def test_what_is_not_here_is_not_asked(
    two_gpus: FakeGpus,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    place: object,
    name: str,
    value: object,
    reason: str,
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr(place, name, value)
    async with open_ipc_pipes(two_gpus, is_connected=False) as pair:
        await pair.near.gpus_settled()
        await expect_by_host(pair)
    assert reason in caplog.text and "both sides have the same GPU" in caplog.text


async def test_memory_that_cuda_would_show_with_more_is_not_shown(
    two_gpus: FakeGpus,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    malloc = FakeCuda.malloc

    def find_little(cuda: FakeCuda, nbytes: int) -> DeviceMemory:
        return fail() if nbytes > LEAST_NBYTES else malloc(cuda, nbytes)

    caplog.set_level("INFO")
    monkeypatch.setattr(FakeCuda, "malloc", find_little)
    async with open_ipc_pipes(two_gpus, is_connected=False) as pair:
        await until(lambda: caplog.text.count(BY_HOST) == 2)
        await expect_by_host(pair)
        assert not pair.opened
    assert "too little memory" in caplog.text


async def test_a_side_whose_memory_is_gone_opens_none(pair: IpcPipes) -> None:
    pages = pair.far_sharing._growth.device_pages
    assert pages is not None
    pages.unmap()
    exported = Exposed("", b"", 2**20, b"", "edges")
    with pytest.raises(ConfigError, match="no memory of a GPU"):
        await pair.far_sharing._import(exported)


async def test_a_gpu_that_does_not_answer_is_given_up(
    two_gpus: FakeGpus,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def wait(*anything: object) -> None:
        await asyncio.Event().wait()

    caplog.set_level("INFO")
    monkeypatch.setattr(pipe_sharing, "AGREE_S", 0.05)
    monkeypatch.setattr(peer_memory, "import_gpu", wait)
    async with open_ipc_pipes(two_gpus, is_connected=False) as pair:
        await until(lambda: caplog.text.count(BY_HOST) == 2)
        await expect_by_host(pair)


async def send_and_receive(pair: IpcPipes) -> None:
    await asyncio.gather(send_many(pair.near, 2), receive_many(pair.far, 2))


# Where bytes change, or cannot be read.


@pytest.mark.parametrize(
    ("ours", "theirs", "kind"),
    [
        ("auto", "auto", "edges"),
        ("full", "auto", "full"),
        ("off", "edges", "edges"),
        ("off", "off", "off"),
    ],
)
async def test_the_stricter_digest_is_compared(
    two_gpus: FakeGpus, ours: Digest, theirs: Digest, kind: str
) -> None:
    async with open_ipc_pipes(two_gpus, listens=theirs, digest=ours) as pair:
        assert pair.near_sharing.digest == pair.far_sharing.digest == kind
        await send_and_receive(pair)
        assert pair.moved == 2


@pytest.mark.parametrize(
    ("digest", "place"), [("auto", 0), ("auto", LARGE - 1), ("full", LARGE // 2)]
)
async def test_other_bytes_than_were_sent_are_noticed(
    two_gpus: FakeGpus, monkeypatch: pytest.MonkeyPatch, digest: Digest, place: int
) -> None:
    async with open_ipc_pipes(two_gpus, digest=digest) as pair:
        held = Held(pair, monkeypatch)
        await pair.near.send_tensor(pair.ours.tensor(noise(LARGE, 1)))
        await held.has_begun.wait()
        (parcel,) = pair.near._outbound._pushed
        assert isinstance(parcel.source, StagedTensor)
        pair.ours.process.cuda.view(parcel.source.place())[place] ^= 1
        held.release()
        with pytest.raises(ChecksumError):
            await pair.far.recv_tensor()
        with pytest.raises(PipeBroken):
            await pair.near.flush()
        del parcel
        await until(lambda: not pair.used_bytes)


async def test_what_cannot_be_read_comes_by_host(
    pair: IpcPipes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(IpcRoute, "_copy", fail)
    await asyncio.gather(send_many(pair.near, 6), receive_many(pair.far, 6))
    await until(lambda: pair.near.transport == pair.far.transport == "inline")
    await expect_by_host(pair)
    await until(lambda: caplog.text.count("from here on") == 2)
    await until(lambda: not pair.opened)
    await until(lambda: not pair.used_bytes)


async def test_a_tensor_that_cannot_be_copied_is_not_sent(
    pair: IpcPipes, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as broken:
        broken.setattr(gpu_side_of(pair.near).pool, "copy", fail)
        with pytest.raises(GPUFailed, match="off the bus"):
            await pair.near.send_tensor(noise(LARGE, 0))
    assert not pair.used_bytes
    await send_and_receive(pair)
    assert pair.near.transport == "cuda_ipc"


@ENDS
async def test_what_is_under_way_when_sharing_ends_comes_once(
    pair: IpcPipes, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    held = Held(pair, monkeypatch)
    await send_many(pair.near, 3)
    await held.has_begun.wait()
    getattr(pair, end).lose("a test")
    await pair.near.send_tensor(noise(LARGE, 3))
    held.release()
    await receive_many(pair.far, 4)
    await pair.near.flush()
    await expect_by_host(pair)
    await until(lambda: not pair.opened)


# Who ends while memory is read.


@pytest.mark.parametrize("aborts", ["sender", "receiver"])
async def test_who_aborts_keeps_what_is_still_read_until_the_gpu_is_done(
    two_gpus: FakeGpus, aborts: str
) -> None:
    async with reading(two_gpus) as (pair, gate):
        gpu = pair.ours if aborts == "sender" else pair.theirs
        if aborts == "sender":
            pair.near.abort()
            with pytest.raises(PeerLost):
                await pair.far.recv_tensor()
        else:
            pair.far.abort()
            with pytest.raises(PipeBroken):
                await pair.near.flush()
        assert arenas_of(gpu) and pair.opened
        gate.open()
        await until(lambda: not pair.opened)
        await until(lambda: not arenas_of(gpu))
    assert not arenas_of(pair.ours)


async def test_a_region_that_is_still_read_is_nobody_elses(
    pair: IpcPipes, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Held(pair, monkeypatch)
    await pair.near.send_tensor(pair.ours.tensor(noise(LARGE, 1)))
    await held.has_begun.wait()
    pair.near._outbound.end(PeerLost("as if the link was lost"))
    assert used_bytes_of(pair.near) == LARGE
    held.release()
    assert is_same(await pair.far.recv_tensor(), noise(LARGE, 1))
    pair.near.abort()
    with pytest.raises(PeerLost):
        await pair.far.recv_tensor()


async def test_who_does_not_close_keeps_the_memory(
    two_gpus: FakeGpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharing, "_LEAVE_S", 0.01)
    monkeypatch.setattr(peer_memory, "_CLOSE_S", 0.01)
    async with reading(two_gpus) as (pair, gate):
        pair.near.abort()
        await pair.near.aclose()
        with pytest.raises(PeerLost):
            await pair.far.recv_tensor()
        await pair.far.aclose()
        assert arenas_of(pair.ours)
        gate.open()
        await until(lambda: not arenas_of(pair.ours))


@pytest.mark.parametrize("which", [0, 1], ids=["far", "near"])
async def test_what_is_closed_meanwhile_shares_nothing(
    two_gpus: FakeGpus, monkeypatch: pytest.MonkeyPatch, which: int
) -> None:
    export, exported = GpuSharing._export, list[GpuSharing]()

    async def close_then(one: GpuSharing, handshake: Handshake) -> None:
        await export(one, handshake)
        exported.append(one)
        if len(exported) == which + 1:
            one.close()

    monkeypatch.setattr(GpuSharing, "_export", close_then)
    async with open_ipc_pipes(two_gpus, is_connected=False) as pair:
        await pair.near.gpus_settled()
        await until(lambda: not pair.opened)
        await send_and_receive(pair)
        assert pair.near.transport == "inline"


async def test_memory_is_shown_once(pair: IpcPipes) -> None:
    hearer = Hearer()
    pair.near._link.open_stream(
        hearer, OpenMemory("pipe", pair.ours.process.cuda.uuid(0))
    )
    frame, _ = await hearer.next()
    assert isinstance(frame, Failure) and pair.opened == 2


async def test_memory_that_nobody_reads_is_not_pinned(pair: IpcPipes) -> None:
    idle = GpuSharing(
        *(pair.near._link, "0" * 32, pair.near_sharing._growth),
        *(pair.near_sharing._pool, "edges"),
    )
    assert not idle.is_open
    region = gpu_side_of(pair.near).spare(LARGE)
    assert region is not None
    source = RegionSource(region, TensorSpec((LARGE,), "uint8"))
    assert idle.show(source, None) is None  # type: ignore[arg-type]
    region.release()


async def test_what_has_no_room_on_the_gpu_comes_by_host(pair: IpcPipes) -> None:
    kept = []
    for seed in range(10):
        await pair.near.send_tensor(noise(LARGE, seed))
        found = await pair.far.recv_tensor()
        assert found is not None and is_same(found, noise(LARGE, seed))
        kept.append(found)
    assert all(found.is_cuda for found in kept) and is_same(kept[0], noise(LARGE, 0))
    assert pair.near.transport == pair.far.transport == "cuda_ipc"
