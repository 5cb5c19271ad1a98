"""What a peer exports and has exported: not shown, not proved, not read any more."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from asynckv.buffers.lookup import LookupBuffer
from asynckv.buffers.remote.peer import connect
from asynckv.buffers.serve import Server
from asynckv.devices.growth import Growth
from asynckv.errors import AsyncKVError, ConfigError, PeerLost
from asynckv.links.fd_socket import has_fd_sockets
from asynckv.links.link import Link, LinkStream
from asynckv.protocol.frames import Cancelled, Frame, OpeningFrame
from asynckv.protocol.transfer_frames import Grant, OpenMemory
from asynckv.sharing import exporter as sharing, imports, peer_imports as importing
from asynckv.sharing.exporter import Exporter, Importer, warn_of_loss
from asynckv.sharing.peer_imports import PeerImports
from asynckv.tensors import shared_file
from asynckv.testing.blocked import until
from asynckv.testing.cancellation import CancelMode, Outcome, sweep_cancellation
from asynckv.testing.expectations import is_same
from asynckv.testing.lookup_checks.values import MIB, noise
from harness.fake_devices import fake_device_of
from harness.fake_gpus import FakeGpus
from harness.gpu_pairs import GpuPair, SharedPuts, open_gpu_pair
from harness.link_pairs import linked

needs_sockets = pytest.mark.skipif(
    not has_fd_sockets(), reason="no sockets for handles"
)


@pytest.mark.skipif(not has_fd_sockets(), reason="nothing to map here")
async def test_a_file_that_is_refused_is_hung_up_on(
    monkeypatch: pytest.MonkeyPatch, local: LookupBuffer, mappable: Server
) -> None:
    def refuse(*anything: object) -> Any:
        raise ValueError("it is not sealed")

    monkeypatch.setattr(shared_file, "check_file", refuse)
    async with connect(mappable.url) as peer:
        assert peer.transport == "inline"
        await until(lambda: not local.exporter._importers)
        assert local.exporter._door is None


class Way:
    """In place of one that is being opened."""

    def __init__(self) -> None:
        self.opened: list[Callable[[], None]] = []

    def call_when_opened(self, callback: Callable[[], None]) -> None:
        self.opened.append(callback)


async def test_a_link_that_a_gpu_waits_on_ends_when_it_waits_no_more() -> None:
    imports, way = PeerImports("edges", ""), Way()
    async with linked() as links:
        imports._ways[links.near] = way  # type: ignore[assignment]
        imports.detach(links.near)
        assert links.near.is_open
        (opened,) = way.opened
        opened()
        assert not links.near.is_open


async def test_any_other_link_ends_at_once() -> None:
    async with linked() as links:
        PeerImports("edges", "").detach(links.near)
        assert not links.near.is_open


@pytest.fixture
async def growth(gpus: FakeGpus) -> AsyncIterator[Growth]:
    """Memory of a GPU, as a peer has it."""
    growth = Growth(2 * MIB, device=fake_device_of(gpus.process()).device)
    await growth.open()
    yield growth
    await growth.aclose()


def uuid_of(growth: Growth) -> str:
    assert growth.device_pages is not None
    return growth.device_pages.allocation.uuid


def exporter_of(imports: PeerImports) -> Exporter:
    assert imports._exporter is not None
    return imports._exporter


async def export(imports: PeerImports, link: Link, uuid: str) -> None:
    """Let the other end read what is put, without opening its memory first."""
    await imports._export(link, exporter_of(imports), uuid)


async def check_goes_by_host(pair: GpuPair) -> None:
    """An insert gets there, and no copy of it lies around."""
    assert not pair.puts.are_read and pair.peer.transport == "cuda_ipc"
    await pair.peer.lookup.insert([1], None, pair.theirs.tensor(noise(MIB)), None, None)
    key = (await pair.buffer.drop_select([1])).key
    assert is_same(key, noise(MIB))  # type: ignore[arg-type]
    del key
    await pair.emptied()


@needs_sockets
async def test_memory_that_cuda_would_show_with_more_is_not_shown(
    gpus: FakeGpus, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, importing.__name__)
    async with open_gpu_pair(gpus, max_bytes=MIB) as pair:
        assert "too little memory" in caplog.text
        assert not pair.ours.process.cuda._opened
        await check_goes_by_host(pair)


@needs_sockets
async def test_memory_that_was_not_proved_is_not_read(
    monkeypatch: pytest.MonkeyPatch, gpus: FakeGpus, caplog: pytest.LogCaptureFixture
) -> None:
    verify, answers = Importer.verify, [True, False]

    def doubt(importer: Importer, nonce: bytes) -> bool:
        return verify(importer, nonce if answers.pop(0) else b"another")

    caplog.set_level(logging.INFO, importing.__name__)
    monkeypatch.setattr(Importer, "verify", doubt)
    async with open_gpu_pair(gpus) as pair:
        assert "not what the memory holds" in caplog.text
        await check_goes_by_host(pair)
    await until(lambda: not pair.ours.process.cuda._opened)


@needs_sockets
async def test_a_buffers_side_that_does_not_answer_costs_a_moment(
    monkeypatch: pytest.MonkeyPatch, gpus: FakeGpus, caplog: pytest.LogCaptureFixture
) -> None:
    async def never(*anything: object) -> Any:
        await asyncio.Event().wait()

    caplog.set_level(logging.INFO, importing.__name__)
    monkeypatch.setattr(importing, "_EXPORT_S", 0.01)
    monkeypatch.setattr(imports, "import_gpu", never)
    async with open_gpu_pair(gpus) as pair:
        assert "no answer" in caplog.text
        await check_goes_by_host(pair)


@needs_sockets
async def test_memory_that_is_closed_is_shown_to_nobody(growth: Growth) -> None:
    sources, uuid = PeerImports("edges", "", growth=growth), uuid_of(growth)
    growth.close()
    async with linked() as links:
        with pytest.raises(ConfigError, match="no memory of a GPU"):
            await export(sources, links.near, uuid)
        assert not links.service.asked and sources.importer(links.near) is None
    await sources.aclose()


@needs_sockets
@pytest.mark.parametrize("answer", [Cancelled(), Grant(1), None], ids=repr)
async def test_whoever_does_not_read_has_nothing(
    growth: Growth, answer: Frame | None
) -> None:
    def say(stream: LinkStream, frame: OpeningFrame, body: bytes) -> None:
        if answer is None:
            links.far.abort()
        else:
            stream.send(answer)

    sources = PeerImports("edges", "", growth=growth)
    async with linked("tcp://127.0.0.1:0", say) as links:
        with pytest.raises(AsyncKVError):
            await export(sources, links.near, uuid_of(growth))
        assert sources.importer(links.near) is None
        await until(lambda: not exporter_of(sources)._importers)
        assert links.near.is_open is (answer == Cancelled())
    await sources.aclose()


@needs_sockets
async def test_a_cancelled_connect_leaves_nothing_open(gpus: FakeGpus) -> None:
    async with open_gpu_pair(gpus, device=None) as pair:

        async def visit() -> bool:
            device = pair.theirs.device
            async with connect(
                pair.server.url, device=device, max_bytes="2MiB"
            ) as peer:
                return SharedPuts(peer).are_read

        async def check(k: int, mode: CancelMode, outcome: Outcome[bool]) -> None:
            assert outcome.cancelled or outcome.value
            await until(lambda: not (pair.opened or pair.ours.process.cuda._opened))
            await until(lambda: not pair.buffer.exporter._importers)
            await until(lambda: len(pair.server._services) == 1)

        counts = await sweep_cancellation(visit, check)
        assert counts.suspensions >= 7


@needs_sockets
async def test_what_is_not_read_any_more_is_told(
    gpus: FakeGpus, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_gpu_pair(gpus, reconnect_s=0) as pair:
        pair.devices.peer_import.close()
        await until(lambda: "from here on" in caplog.text)
        assert "the peer has closed memory" in caplog.text
        assert not pair.puts.are_read
    assert caplog.text.count("from here on") == 1


@needs_sockets
async def test_what_is_not_read_any_more_is_no_news_after_its_link(
    gpus: FakeGpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_gpu_pair(gpus, reconnect_s=0) as pair:
        importer, had = pair.puts.importer, list[str]()
        monkeypatch.setattr(sharing, "_warn_of_loss", lambda *_: had.append("told"))
        monkeypatch.setattr(sharing, "_TELL_S", 0)
        pair.peer._linked().abort()
        await until(lambda: importer._connection is None)
        await asyncio.sleep(0)
        assert not (had or pair.puts.are_read)


@needs_sockets
@pytest.mark.parametrize("is_open", [True, False])
async def test_a_loss_is_no_news_when_the_link_is_lost_soon(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, is_open: bool
) -> None:
    had, warn = list[Link](), sharing._warn_of_loss

    def note(link: Link, *words: str) -> None:
        had.append(link)
        warn(link, *words)

    monkeypatch.setattr(sharing, "_warn_of_loss", note)
    async with linked() as links:
        warn_of_loss(links.near, "what is put at", "it is gone")
        if not is_open:
            links.near.abort()
        await until(lambda: bool(had))
    assert caplog.text.count("from here on: it is gone") == int(is_open)


@needs_sockets
async def test_who_still_reads_goes_on(gpus: FakeGpus) -> None:
    async with open_gpu_pair(gpus) as pair:
        pair.puts.importer.on_message(b"")  # as where it has let something go
        assert pair.puts.are_read


@needs_sockets
async def test_a_peer_that_stands_still_is_not_waited_for_long(
    monkeypatch: pytest.MonkeyPatch, gpus: FakeGpus
) -> None:
    monkeypatch.setattr(sharing, "_LEAVE_S", 0.01)
    async with open_gpu_pair(gpus) as pair:
        memory = pair.devices.peer_import._memory
        hold = monkeypatch.context()
        with hold as patch:
            patch.setattr(memory, "close", lambda: None)
            await pair.peer.aclose()
            assert pair.ours.process.cuda._opened
        memory.close()
    await until(lambda: not pair.ours.process.cuda._opened)


@needs_sockets
async def test_a_lost_link_ends_the_wait_to_be_read(growth: Growth) -> None:
    sources = PeerImports("edges", "", growth=growth)
    async with linked("tcp://127.0.0.1:0", lambda *_: None) as links:
        showing = asyncio.create_task(export(sources, links.near, uuid_of(growth)))
        await until(lambda: bool(links.service.asked))
        assert isinstance(links.service.asked[0][1], OpenMemory)
        links.near.abort()
        with pytest.raises(PeerLost):
            await showing
    await sources.aclose()
