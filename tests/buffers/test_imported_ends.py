"""Memory of a GPU that is not opened, not proved, not answered for, or let go late."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import struct
from collections.abc import Callable

import pytest
import torch

from asynckv import ConfigError, GPUFailed, Peer, PeerLost, connect
from asynckv.devices.arena import DeviceAllocation
from asynckv.devices.cuda import DeviceMemory, Event
from asynckv.devices.growth import Growth
from asynckv.devices.imports import import_allocation
from asynckv.links.fd_socket import has_fd_sockets
from asynckv.links.link import LinkStream
from asynckv.protocol.failures import to_failure
from asynckv.protocol.frames import Cancelled, Frame, OpeningFrame
from asynckv.protocol.transfer_frames import Exposed, Grant, OpenDevices
from asynckv.sharing import exporter as sharing, imports, peer_imports as importing
from asynckv.sharing.exporter import ExportedMemory, Importer
from asynckv.sharing.imports import GpuImport, ImportedMemory
from asynckv.sharing.mappings import MappedPin
from asynckv.sharing.peer_imports import PeerImports
from asynckv.testing import (
    CancelMode,
    Outcome,
    sweep_cancellation,
    until,
)
from asynckv.testing.expectations import is_same
from asynckv.testing.lookup_checks.values import MIB, noise, started
from harness.fake_devices import fake_device_of
from harness.fake_gpus import FakeGpus
from harness.fake_gpus.streams import Delay, FakeEvent
from harness.gpu_pairs import GpuPair, open_gpu_pair
from harness.link_pairs import linked

pytestmark = pytest.mark.skipif(not has_fd_sockets(), reason="no sockets for handles")


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits long for memory that never comes back."""
    monkeypatch.setattr(importing, "OPEN_S", 0.01)
    monkeypatch.setattr(sharing, "_LEAVE_S", 0.01)


def memory_of(peer: Peer) -> ImportedMemory:
    link = peer.link_nowait()
    assert link is not None
    memory = peer._imports.of(link)
    assert isinstance(memory, ImportedMemory)
    return memory


async def insert(pair: GpuPair) -> None:
    await pair.buffer.insert([1], None, noise(MIB), None, None)


async def view_of(pair: GpuPair) -> torch.Tensor:
    """Return a view of an entry that has left the buffer."""
    await insert(pair)
    async with pair.peer.lookup.drop_select([1]) as entry:
        key = entry.key
    assert isinstance(key, torch.Tensor)
    return key


async def test_memory_that_was_not_proved_is_not_read(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, gpus: FakeGpus
) -> None:
    monkeypatch.setattr(Importer, "verify", lambda self, nonce: False)
    caplog.set_level(logging.INFO, importing.__name__)
    async with open_gpu_pair(gpus) as pair:
        assert pair.peer.transport == "inline"
        await insert(pair)
        assert is_same((await pair.peer.lookup.drop_select([1])).key, noise(MIB))  # type: ignore[arg-type]
        await until(lambda: not pair.opened)
    assert caplog.text.count("goes through host memory") == 1


@pytest.mark.parametrize("handle", [b"", b"no handle"])
async def test_without_a_handle_bytes_go_through_host_memory(
    pair: GpuPair, handle: bytes
) -> None:
    pages = pair.buffer.growth.device_pages
    assert pages is not None
    shown = pair.buffer.exporter._file
    assert isinstance(shown, ExportedMemory)
    pages.allocation.handle = shown.handle = handle
    async with connect(
        pair.server.url, device=pair.theirs.device, max_bytes=MIB
    ) as peer:
        assert peer.transport == "inline"
    assert pair.opened == 1


async def test_another_host_is_not_asked(pair: GpuPair) -> None:
    peer = connect(pair.server.url, device=pair.theirs.device, max_bytes=MIB)
    peer._imports._boot_id = "another"
    async with peer:
        assert peer.transport == "inline"


async def test_a_server_that_does_not_answer_costs_a_moment(
    monkeypatch: pytest.MonkeyPatch, impatient: None, gpus: FakeGpus
) -> None:
    async def never(address: str, ticket: bytes) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(imports, "fetch_file", never)
    async with open_gpu_pair(gpus) as pair:
        assert pair.peer.transport == "inline"


async def test_a_link_that_is_lost_meanwhile_is_lost(
    monkeypatch: pytest.MonkeyPatch, pair: GpuPair
) -> None:
    def cut(importer: Importer, nonce: bytes) -> bool:
        for services in pair.server._services:
            services.link.abort()
        return False

    monkeypatch.setattr(Importer, "verify", cut)
    with pytest.raises(PeerLost):
        async with connect(pair.server.url, device=pair.theirs.device, max_bytes=MIB):
            raise AssertionError


async def test_a_cancelled_connect_leaves_nothing_behind(gpus: FakeGpus) -> None:
    async with open_gpu_pair(gpus, device=None) as pair:

        async def visit() -> str:
            device = pair.theirs.device
            peer = connect(pair.server.url, device=device, max_bytes="1MiB")
            async with peer:
                return peer.transport

        async def check(k: int, mode: CancelMode, outcome: Outcome[str]) -> None:
            assert outcome.cancelled or outcome.value == "cuda_ipc"
            await until(lambda: not pair.opened)
            await until(lambda: not pair.buffer.exporter._importers)

        counts = await sweep_cancellation(visit, check)
        assert counts.suspensions >= 5


@pytest.mark.parametrize("answer", [Cancelled(), Grant(1), "Exposed twice"])
async def test_what_is_no_invitation_opens_nothing(
    monkeypatch: pytest.MonkeyPatch, gpus: FakeGpus, answer: Frame | str
) -> None:
    def say(stream: LinkStream, frame: OpeningFrame, body: bytes) -> None:
        exported = Exposed(f"asynckv-{0:032}", b"t" * 16, MIB + 512, b"h" * 64)
        frames = [answer] if not isinstance(answer, str) else [exported, exported]
        if isinstance(frame, OpenDevices):
            stream.send(to_failure(ConfigError("nor a way to it")))
            return
        for one in frames:
            stream.send(one)

    monkeypatch.setattr(PeerImports, "_check_here", lambda self, link: None)
    growth = Growth(MIB, device=fake_device_of(gpus.process()).device)
    async with linked("tcp://127.0.0.1:0", say) as links:
        found = PeerImports("edges", "", growth=growth)
        with contextlib.suppress(PeerLost):
            await found.open(links.near)
        assert links.service.asked and found.of(links.near) is None
        assert links.near.is_open is (answer == Cancelled())
    await growth.aclose()


async def test_a_mem_link_has_no_memory_to_open(gpus: FakeGpus) -> None:
    growth = Growth(MIB, device=fake_device_of(gpus.process()).device)
    async with linked("mem://") as links:
        found = PeerImports("edges", "", growth=growth)
        await found.open(links.near)
        assert found.of(links.near) is None and not links.service.asked
    await growth.aclose()


async def test_it_is_closed_once_however_often_the_end_is_told(pair: GpuPair) -> None:
    memory = memory_of(pair.peer)
    memory.link_over()
    memory.link_over()
    await memory.closed
    assert not pair.opened
    memory.imported.close_soon(memory.closed)  # as if nobody had heard of it
    await until(memory.closed.done)


async def test_a_view_outlives_the_link_and_the_peer(
    pair: GpuPair, gpus: FakeGpus
) -> None:
    key = await view_of(pair)
    closing = asyncio.create_task(pair.peer.aclose())
    await closing
    assert pair.opened == 1 and is_same(key, noise(MIB))
    del key
    await until(lambda: not pair.opened)


def is_in_a_child(patch: pytest.MonkeyPatch, pair: GpuPair) -> None:
    patch.setattr(memory_of(pair.peer), "_pid", os.getpid() + 1)


def cannot_be_asked(patch: pytest.MonkeyPatch, pair: GpuPair) -> None:
    def fail(tensor: torch.Tensor) -> DeviceMemory:
        raise GPUFailed("it has fallen off the bus")

    patch.setattr(pair.theirs.tensors, "mark", fail)


@pytest.mark.parametrize("trouble", [is_in_a_child, cannot_be_asked])
async def test_memory_stays_the_peers_loss_where_the_end_of_a_view_is_not_told(
    monkeypatch: pytest.MonkeyPatch,
    pair: GpuPair,
    trouble: Callable[[pytest.MonkeyPatch, GpuPair], None],
) -> None:
    key = await view_of(pair)
    with monkeypatch.context() as patch:
        trouble(patch, pair)
        del key
    for _ in range(20):
        await asyncio.sleep(0)
    assert pair.pinned_bytes == MIB
    memory_of(pair.peer).release(1)
    await until(lambda: not pair.pinned_bytes)


async def test_memory_stays_the_peers_loss_where_the_gpu_does_not_answer(
    monkeypatch: pytest.MonkeyPatch, pair: GpuPair
) -> None:
    asked = list[Event]()

    def fail(event: FakeEvent) -> bool:
        asked.append(event)
        raise GPUFailed("it has fallen off the bus")

    key = await view_of(pair)
    with monkeypatch.context() as patch:
        patch.setattr(FakeEvent, "query", fail)
        del key
        await until(lambda: bool(asked))
    assert pair.pinned_bytes == MIB and not memory_of(pair.peer).has_views
    memory_of(pair.peer).release(1)
    await until(lambda: not pair.pinned_bytes)


async def test_a_closed_buffer_waits_for_who_has_its_memory_open(
    pair: GpuPair,
) -> None:
    pair.buffer.abort()
    closing = await started(pair.buffer.aclose())
    assert pair.ours.process.owned  # or the peer would read what is not there
    await pair.peer.aclose()
    await closing
    assert not pair.ours.process.owned


async def test_who_keeps_views_keeps_the_memory_of_a_closed_buffer(
    pair: GpuPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = await view_of(pair)
    monkeypatch.setattr(sharing, "_LEAVE_S", 0.01)
    await pair.buffer.aclose()
    assert is_same(key, noise(MIB)) and pair.ours.process.owned
    del key
    await pair.peer.aclose()
    await until(lambda: not pair.ours.process.owned)


def test_views_may_go_when_the_loop_is_closed(gpus: FakeGpus) -> None:
    cuda, theirs = gpus.process().cuda, fake_device_of(gpus.process())
    shown = cuda.export(cuda.malloc(MIB))
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    async def take() -> MappedPin:
        opened = theirs.device.opened()
        own = DeviceAllocation(opened, opened.cuda.malloc(MIB))
        allocation = import_allocation(opened.cuda, 0, shown, MIB)
        memory = ImportedMemory(GpuImport(near, allocation, opened), "edges", own)
        pin = memory.take(1)
        memory.link_over()
        return pin

    pin = asyncio.run(take())
    theirs.tensors.stream(0).add(Delay(5))
    del pin
    assert far.recv(8) == struct.pack("!Q", 1) and far.recv(8) == b""
    assert not theirs.process.cuda._opened and not theirs.tensors.stream(0).work
    far.close()
