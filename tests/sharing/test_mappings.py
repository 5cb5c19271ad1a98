"""The side that reads a peer's memory, in two sides of one process."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import posix
import threading
from collections.abc import AsyncIterator

import pytest
import torch

from asynckv.buffers.lookup import LookupBuffer
from asynckv.buffers.remote.peer import Peer, connect
from asynckv.buffers.serve import Server, serve
from asynckv.errors import IncompatiblePeer, LeaseLost, PeerLost
from asynckv.links.fd_socket import has_fd_sockets
from asynckv.links.link import Link, LinkStream
from asynckv.protocol.frames import OpeningFrame, Peek, Result
from asynckv.protocol.transfer_frames import Exposed, OpenMemory
from asynckv.sharing import handshake, peer_imports
from asynckv.sharing.exporter import Importer
from asynckv.sharing.handshake import Handshake
from asynckv.tensors.paged_arena import SlabArena
from asynckv.tensors.stitching import Claim
from asynckv.testing.blocked import until
from harness.buffer_fixtures import memory_of
from harness.link_pairs import Hearer, linked

pytestmark = pytest.mark.skipif(not has_fd_sockets(), reason="nothing to map here")

MIB = 2**20


@pytest.fixture
async def buffer() -> AsyncIterator[LookupBuffer]:
    async with LookupBuffer(8 * MIB, drain_s=0) as buffer:
        yield buffer


@pytest.fixture
async def server(buffer: LookupBuffer) -> AsyncIterator[Server]:
    async with serve("tcp://127.0.0.1:0", lookup=buffer) as server:
        yield server


@pytest.fixture
async def peer(server: Server) -> AsyncIterator[Peer]:
    async with connect(server.url, reconnect_s=5) as peer:
        yield peer


async def insert(buffer: LookupBuffer, value: float = 1.0, nbytes: int = MIB) -> None:
    tensor = torch.full((nbytes // 4,), value)
    await buffer.insert([1, 2], None, tensor, None, None)


async def view_in(buffer: LookupBuffer, peer: Peer, value: float = 1.0) -> torch.Tensor:
    """Insert a tensor, and return the view of it that a select gives."""
    await insert(buffer, value)
    async with peer.lookup.drop_select() as entry:
        assert isinstance(entry.key, torch.Tensor)
        return entry.key


def pinned(buffer: LookupBuffer) -> int:
    return buffer.statistics().pinned_bytes


@pytest.mark.both_loops
@pytest.mark.parametrize("scheme", ["tcp", "unix"])
async def test_memory_is_mapped_whatever_the_scheme(
    buffer: LookupBuffer, scheme: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("map")
    url = "tcp://127.0.0.1:0" if scheme == "tcp" else f"unix://{folder}/sock"
    async with serve(url, lookup=buffer) as server, connect(server.url) as peer:
        assert peer.transport == "map"
        assert (await view_in(buffer, peer, 4.0)).eq(4.0).all()


async def test_a_view_is_no_copy(buffer: LookupBuffer, peer: Peer) -> None:
    await insert(buffer, 1.0)
    async with peer.lookup.drop_select() as entry:
        assert isinstance(entry.key, torch.Tensor)
        (stored,) = buffer.ledger.table.entries.values()
        region = stored.parts[0].region
        assert region is not None
        region.view()[:4] = b"\0\0\0\0"  # which nobody may do but this test
        assert entry.key[0] == 0
    del entry, region, stored


async def test_a_view_keeps_its_bytes_while_the_buffer_is_churned_ten_times_over(
    buffer: LookupBuffer, peer: Peer
) -> None:
    view = await view_in(buffer, peer)
    for value in range(80):
        await insert(buffer, float(value))
        taken = await peer.lookup.drop_select()
        assert isinstance(taken.key, torch.Tensor) and taken.key[-1] == value
        assert view.eq(1.0).all()
    assert pinned(buffer) == MIB
    del view
    await until(lambda: pinned(buffer) == 0)


async def test_a_plain_await_gives_memory_of_ones_own(
    buffer: LookupBuffer, peer: Peer
) -> None:
    await insert(buffer, 5.0)
    entry = await peer.lookup.drop_select()
    assert isinstance(entry.key, torch.Tensor)
    await until(lambda: buffer.statistics().used_bytes == 0)
    assert pinned(buffer) == 0
    entry.key.add_(1)
    assert entry.key.eq(6.0).all()


async def test_little_of_an_entry_may_lie_on_the_heap(
    buffer: LookupBuffer, peer: Peer
) -> None:
    await insert(buffer)  # the first slab
    await buffer.drop_select()
    key = buffer.empty((MIB,), torch.uint8).fill_(3)
    hidden = torch.arange(100)
    await buffer.insert([1], None, key, None, hidden)
    del key
    async with peer.lookup.drop_select() as entry:
        assert isinstance(entry.key, torch.Tensor) and entry.hidden is not None
        assert entry.key.eq(3).all()
        assert torch.equal(entry.hidden, hidden)
    del entry


async def test_views_die_in_any_thread(buffer: LookupBuffer, peer: Peer) -> None:
    views = [await view_in(buffer, peer)]
    assert pinned(buffer) == MIB
    thread = threading.Thread(target=views.clear)
    thread.start()
    thread.join()
    await until(lambda: pinned(buffer) == 0)


async def test_views_in_a_cycle_are_let_go_by_the_garbage_collector(
    buffer: LookupBuffer, peer: Peer
) -> None:
    cycle: list[object] = [await view_in(buffer, peer)]
    cycle.append(cycle)
    del cycle
    gc.collect()
    await until(lambda: pinned(buffer) == 0)


async def test_a_view_outlives_the_peer_and_the_buffer() -> None:
    async with LookupBuffer(4 * MIB, drain_s=0) as buffer:
        async with (
            serve("tcp://127.0.0.1:0", lookup=buffer) as server,
            connect(server.url) as peer,
        ):
            view = await view_in(buffer, peer, 9.0)
        assert pinned(buffer) == MIB
    assert view.eq(9.0).all()


async def test_a_cut_link_takes_no_view_away_and_the_exit_says_so(
    buffer: LookupBuffer, server: Server, peer: Peer
) -> None:
    await insert(buffer, 2.0)
    with pytest.raises(LeaseLost):
        async with peer.lookup.drop_select() as entry:
            (link,) = server._services
            link.link.abort()
            other = await buffer.drop_select()
            await insert(buffer, 3.0)
            assert isinstance(entry.key, torch.Tensor)
            assert entry.key.eq(2.0).all()
            assert pinned(buffer) == MIB
    del other, entry
    await until(lambda: pinned(buffer) == 0)


async def test_the_file_is_mapped_once_for_all_links(
    buffer: LookupBuffer, server: Server, peer: Peer
) -> None:
    before = memory_of(peer)
    (services,) = server._services
    services.link.abort()
    await until(lambda: not peer.is_connected)
    await until(lambda: peer.is_connected)
    after = memory_of(peer)
    assert peer.transport == "map"
    assert after is not before and after.file is before.file


async def test_a_cancelled_wait_pins_nothing(buffer: LookupBuffer, peer: Peer) -> None:
    for _ in range(20):
        waiting = asyncio.create_task(peer.lookup.drop_select())
        await asyncio.sleep(0)
        inserting = asyncio.create_task(insert(buffer))
        await until(lambda: buffer.statistics().entries > 0)
        waiting.cancel()
        await asyncio.wait({waiting, inserting})
        while buffer.statistics().entries:
            await buffer.drop_select()
    await until(lambda: pinned(buffer) == 0)
    assert not buffer.statistics().mapped_by


async def test_whoever_keeps_the_error_of_a_cancelled_call_keeps_no_memory(
    buffer: LookupBuffer, peer: Peer
) -> None:
    await insert(buffer)
    taking = asyncio.create_task(peer.lookup.drop_select())
    await until(lambda: bool(buffer.statistics().mapped_by))
    memory = memory_of(peer)
    await until(lambda: bool(memory.pins) or taking.done())
    taking.cancel()
    with pytest.raises(asyncio.CancelledError) as kept:
        await taking
    await until(lambda: not buffer.statistics().mapped_by)
    assert kept.value.__traceback__ is not None


async def shown(buffer: LookupBuffer, peer: Peer, count: int) -> list[object]:
    """Return views of so many deliveries that take a thread to look through."""
    views = list[object]()
    for _ in range(count):
        await insert(buffer, nbytes=5 * MIB)
        async with peer.lookup.drop_select() as entry:
            views.append(entry.key)
    return views


async def test_where_there_are_no_more_threads_a_large_view_is_let_go_at_once(
    monkeypatch: pytest.MonkeyPatch, buffer: LookupBuffer, peer: Peer
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    views = await shown(buffer, peer, 1)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        views.clear()
    assert not memory_of(peer).pins
    await until(lambda: pinned(buffer) == 0)


async def test_one_thread_lets_go_of_all_large_views_that_end_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with (
        LookupBuffer(16 * MIB, drain_s=0) as buffer,
        serve("tcp://127.0.0.1:0", lookup=buffer) as server,
        connect(server.url) as peer,
    ):
        views = await shown(buffer, peer, 3)
        file, goes_on, threads = memory_of(peer).file, threading.Event(), set[int]()
        release = file.release

        def released(claim: Claim) -> None:
            threads.add(threading.get_ident())
            goes_on.wait(10)
            release(claim)

        monkeypatch.setattr(file, "release", released)
        views.clear()
        assert memory_of(peer).pins == 3
        goes_on.set()
        await until(lambda: pinned(buffer) == 0)
        assert len(threads) == 1


async def test_a_full_connection_tells_of_the_end_later(
    monkeypatch: pytest.MonkeyPatch, buffer: LookupBuffer, peer: Peer
) -> None:
    view = await view_in(buffer, peer)
    memory = memory_of(peer)
    sock = memory._sock

    class Full:
        def __init__(self) -> None:
            self.refusals = 1

        def send(self, data: bytes) -> int:
            if self.refusals:
                self.refusals -= 1
                raise BlockingIOError
            return sock.send(data)

        def fileno(self) -> int:
            return sock.fileno()

        def close(self) -> None:
            sock.close()

    monkeypatch.setattr(memory, "_sock", Full())
    del view
    await until(lambda: pinned(buffer) == 0)


async def test_what_a_forked_child_can_see_is_let_go_with_the_connection_only(
    buffer: LookupBuffer, peer: Peer
) -> None:
    await insert(buffer)
    async with peer.lookup.drop_select() as entry:
        memory_of(peer).keep_for_child()
    del entry
    await insert(buffer)
    async with peer.lookup.drop_select() as entry:
        pass
    del entry
    await until(lambda: pinned(buffer) == MIB)
    await peer.aclose()
    await until(lambda: pinned(buffer) == 0)


async def test_a_fork_of_the_owner_keeps_no_memory_of_others_views(
    buffer: LookupBuffer, peer: Peer
) -> None:
    view = await view_in(buffer, peer)
    arena = buffer.growth.arena
    assert isinstance(arena, SlabArena)
    arena.keep_for_child()
    del view
    await until(lambda: pinned(buffer) == 0)
    assert buffer.statistics().handed_out_bytes == 0


async def test_a_forked_child_says_nothing(buffer: LookupBuffer, peer: Peer) -> None:
    view = await view_in(buffer, peer)
    pid = posix.fork()  # slipcover falls over a child of os.fork
    if not pid:
        del view
        gc.collect()
        os._exit(0)
    await asyncio.to_thread(os.waitpid, pid, 0)
    for _ in range(20):
        await asyncio.sleep(0)
    assert pinned(buffer) == MIB
    del view


async def test_without_a_mapping_there_is_one_line_of_the_log(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    buffer: LookupBuffer,
    server: Server,
) -> None:
    monkeypatch.setattr(Importer, "verify", lambda self, nonce: False)
    caplog.set_level(logging.INFO, peer_imports.__name__)
    async with connect(server.url) as peer:
        assert peer.transport == "inline"
        await insert(buffer)
        assert (await peer.lookup.drop_select()).nbytes == MIB + 16
    assert caplog.text.count("by lanes") == 1


async def test_a_server_that_does_not_answer_costs_a_moment(
    monkeypatch: pytest.MonkeyPatch, server: Server
) -> None:
    async def never(address: str, ticket: bytes) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(peer_imports, "fetch_file", never)
    monkeypatch.setattr(peer_imports, "OPEN_S", 0.01)
    async with connect(server.url) as peer:
        assert peer.transport == "inline"


async def test_a_server_that_never_accepts_the_proof_loses_the_link(
    monkeypatch: pytest.MonkeyPatch, server: Server
) -> None:
    monkeypatch.setattr(Handshake, "accept", lambda handshake: None)
    monkeypatch.setattr(handshake, "_ACCEPT_S", 0.01)
    with pytest.raises(PeerLost, match="did not say"):
        async with connect(server.url):
            raise AssertionError


async def test_a_cancelled_connect_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch, buffer: LookupBuffer, server: Server
) -> None:
    asked = asyncio.Event()

    async def never(address: str, ticket: bytes) -> None:
        asked.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(peer_imports, "fetch_file", never)
    peer = connect(server.url)
    entering = asyncio.create_task(peer.__aenter__())
    await asked.wait()
    entering.cancel()
    await asyncio.wait({entering})
    assert entering.cancelled()
    await until(lambda: not server.peers)
    await until(lambda: buffer.exporter._door is None)
    peer.abort()


async def test_who_wants_a_mapping_only_gets_no_lanes_instead(
    monkeypatch: pytest.MonkeyPatch, server: Server
) -> None:
    async with connect(f"{server.url}?payload=map") as peer:
        assert peer.transport == "map"
    monkeypatch.setattr(Importer, "verify", lambda self, nonce: False)
    with pytest.raises(IncompatiblePeer, match="cannot be mapped"):
        async with connect(f"{server.url}?payload=map"):
            raise AssertionError


async def test_another_host_is_not_asked(server: Server) -> None:
    peer = connect(server.url)
    peer._imports._boot_id = "another"
    async with peer:
        assert peer.transport == "inline"


@pytest.mark.parametrize("digest", ["full", "edges", "off", "auto"])
async def test_every_way_to_compare_finds_the_same_bytes(
    buffer: LookupBuffer, server: Server, digest: str
) -> None:
    async with connect(server.url, digest=digest) as peer:  # type: ignore[arg-type]
        assert peer.transport == "map"
        await insert(buffer, 1.0)
        assert (await peer.lookup.drop_select()).key_tensor.eq(1.0).all()
        assert (await view_in(buffer, peer, 2.0)).eq(2.0).all()


async def test_a_lost_peer_is_told_while_a_view_lives(
    buffer: LookupBuffer, peer: Peer
) -> None:
    view = await view_in(buffer, peer, 8.0)
    await peer.aclose()
    with pytest.raises(PeerLost):
        await peer.lookup.drop_select()
    assert view.eq(8.0).all()


async def test_memory_that_comes_after_a_cancel_breaks_no_link() -> None:
    def answer(stream: LinkStream, frame: OpeningFrame, body: bytes) -> None:
        if isinstance(frame, Peek):
            stream.send(Result(1))

    async def wait(link: Link) -> Exposed:
        with Handshake.ask(link, OpenMemory("lookup")) as handshake:
            return await handshake.exposed

    async with linked(answer=answer) as pair:
        opening = asyncio.create_task(wait(pair.near))
        await until(lambda: bool(pair.service.asked))
        opening.cancel()
        await asyncio.wait({opening})
        stream, _, _ = pair.service.asked[0]
        stream.send(Exposed(f"asynckv-{0:032}", b"t" * 16, 2**20))
        hearer = Hearer()
        pair.near.open_stream(hearer, Peek(False))
        await hearer.next()
