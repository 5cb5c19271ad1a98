"""What one peer's payload is read by, and where it would be staged."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import torch

from asynckv.buffers.lookup import LookupBuffer
from asynckv.buffers.remote.peer import Peer, connect
from asynckv.buffers.serve import Server, serve
from asynckv.buffers.serving import select as serve_mapped, select as serve_shown
from asynckv.errors import PeerLost
from asynckv.links.fd_socket import has_fd_sockets
from asynckv.protocol.values import Place
from asynckv.testing.blocked import until
from asynckv.testing.expectations import is_same
from asynckv.testing.lookup_checks.values import MIB, noise
from asynckv.transfers.manifest import INLINE_NBYTES
from asynckv.transfers.readers import MapReader
from harness.fake_devices import fake_device_of
from harness.fake_gpus import FakeGpus
from harness.gpu_pairs import open_gpu_pair

needs_sockets = pytest.mark.skipif(
    not has_fd_sockets(), reason="no sockets for handles"
)


async def test_one_reader_serves_all_calls_of_its_kind(mappable: Server) -> None:
    async with connect(mappable.url) as peer:
        link = peer._linked()
        views, copies = (peer.routes.reader(link, views=v) for v in (True, False))
        assert isinstance(views, MapReader) and views is not copies
        assert peer.routes.reader(link, views=True) is views
        assert peer.routes.reader(link, views=False) is copies


async def test_memory_of_another_link_has_another_reader(mappable: Server) -> None:
    async with connect(mappable.url, reconnect_s=5) as peer:
        first = peer._linked()
        reader = peer.routes.reader(first, views=False)
        first.abort()
        second = await peer.link()
        again = peer.routes.reader(second, views=False)
        assert again is not None and again is not reader


async def test_without_memory_that_is_shown_there_is_nothing_to_read_by(
    local: LookupBuffer,
) -> None:
    async with serve("mem://", lookup=local) as server, connect(server.url) as peer:
        link = peer._linked()
        assert peer.routes.reader(link, views=True) is None
        assert peer.routes.nccl(link) is None and peer.routes.importer(link) is None
        assert not peer.reads_gpu


async def test_only_what_does_not_ride_is_staged_and_on_a_link(gpus: FakeGpus) -> None:
    async with open_gpu_pair(gpus) as pair:
        routes, link = pair.peer.routes, pair.peer._linked()
        assert pair.peer.reads_gpu
        assert routes.staging(link, INLINE_NBYTES) is None
        assert routes.staging(link, INLINE_NBYTES + 1) is not None
        assert routes.staging(None, INLINE_NBYTES + 1) is None
    assert not pair.peer.reads_gpu
    assert routes.staging(link, INLINE_NBYTES + 1) is None


@pytest.fixture
async def buffer(gpus: FakeGpus) -> AsyncIterator[LookupBuffer]:
    device = fake_device_of(gpus.process()).device
    async with LookupBuffer("16MiB", device=device, drain_s=0) as buffer:
        yield buffer


@pytest.fixture
async def peer(gpus: FakeGpus, buffer: LookupBuffer) -> AsyncIterator[Peer]:
    device = fake_device_of(gpus.process()).device
    async with (
        serve("tcp://127.0.0.1:0", lookup=buffer) as server,
        connect(server.url, device=device, max_bytes="16MiB") as peer,
    ):
        yield peer


@needs_sockets
async def test_a_part_lands_in_host_memory_where_the_caller_wants_it_there(
    buffer: LookupBuffer, peer: Peer
) -> None:
    await buffer.insert([1], None, noise(MIB), None, None)
    into = {"key": torch.zeros(MIB, dtype=torch.uint8)}
    entry = await peer.lookup.drop_select([1], into=into)
    assert entry.key is into["key"] and is_same(into["key"], noise(MIB))


@needs_sockets
async def test_what_rode_along_is_on_the_gpu_beside_what_lies_there(
    buffer: LookupBuffer, peer: Peer
) -> None:
    key = buffer.empty((MIB,), torch.uint8)
    key.copy_(noise(MIB))
    await buffer.insert([1], None, key, None, noise(8))
    del key
    async with peer.lookup.drop_select([1]) as entry:
        assert entry.hidden is not None and entry.hidden.is_cuda
        assert is_same(entry.hidden, noise(8))
        assert is_same(entry.key, noise(MIB))  # type: ignore[arg-type]


@needs_sockets
async def test_a_tensor_in_several_places_breaks_the_link(
    monkeypatch: pytest.MonkeyPatch, buffer: LookupBuffer, peer: Peer
) -> None:
    apart = Place(((0, MIB // 2), (MIB, MIB // 2)), 0, 1)
    monkeypatch.setattr(serve_mapped, "place_of", lambda region: apart)
    await buffer.insert([1], None, noise(MIB), None, None)
    with pytest.raises(PeerLost, match="several places"):
        await peer.lookup.drop_select([1])
    await until(lambda: not buffer.statistics().mapped_by)


@needs_sockets
async def test_a_part_of_a_stream_that_rides_has_no_place(
    monkeypatch: pytest.MonkeyPatch, buffer: LookupBuffer, peer: Peer
) -> None:
    monkeypatch.setattr(serve_shown, "EAGER_NBYTES", -1)
    await buffer.insert([1], None, noise(MIB), None, noise(8))
    with pytest.raises(PeerLost, match="rides has a place"):
        async with peer.lookup.open_drop_select([1]) as stream:
            await anext(stream)
    await until(lambda: not buffer.statistics().mapped_by)
