"""What one peer's payload is read by, and where it would be staged."""

from __future__ import annotations

from asynckv.buffers.lookup import LookupBuffer
from asynckv.buffers.remote.peer import connect
from asynckv.buffers.serve import Server, serve
from asynckv.transfers.manifest import INLINE_NBYTES
from asynckv.transfers.readers import MapReader
from harness.fake_gpus import FakeGpus
from harness.gpu_pairs import open_gpu_pair


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
