"""Memory that a peer maps: shown, pinned, and let go of late or never."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import struct
import threading
from collections.abc import AsyncIterator

import msgspec
import pytest
import torch

from asynckv import EntryTooLarge, KVEntry, LookupBuffer, Peer, Server, connect, serve
from asynckv.links.dial import dial
from asynckv.links.fd_socket import fetch_file
from asynckv.protocol.frames import (
    Accepted,
    Ack,
    Failure,
    Nack,
    Select,
)
from asynckv.protocol.transfer_frames import Grant, Proved, Sent
from asynckv.protocol.values import Place
from asynckv.sharing import exporter
from asynckv.sharing.mappings import MappedMemory
from asynckv.tensors.arena import Region
from asynckv.tensors.shared_file import MappedFile, edges_of
from asynckv.tensors.stitching import Claim
from asynckv.tensors.views import bytes_of
from asynckv.testing import until
from harness.buffer_fixtures import memory_of
from harness.link_pairs import Hearer, name_of
from harness.raw_inserts import RawMapper

MIB = 2**20


def pinned(buffer: LookupBuffer) -> int:
    return buffer.statistics().pinned_bytes


async def insert(buffer: LookupBuffer, value: float = 1.0, nbytes: int = MIB) -> None:
    tensor = torch.full((nbytes // 4,), value)
    await buffer.insert([1, 2], None, tensor, None, None)


async def taken(mapper: RawMapper) -> int:
    """Take an entry, and keep its memory; return what it is pinned by."""
    hearer, stream, offer, _ = await mapper.select()
    assert offer.mapped is not None
    stream.send(Ack(offer.token))
    assert isinstance((await hearer.next())[0], Accepted)
    return offer.mapped.pin


async def test_memory_is_pinned_until_it_is_released(
    local: LookupBuffer, mapper: RawMapper
) -> None:
    await insert(local)
    await mapper.map()
    pin = await taken(mapper)
    assert pinned(local) == MIB
    assert list(local.statistics().mapped_by.values()) == [1]
    mapper.release(pin)
    await until(lambda: pinned(local) == 0)
    assert not local.statistics().mapped_by


async def test_memory_is_pinned_also_when_the_entry_goes_to_somebody_else(
    local: LookupBuffer, mapper: RawMapper
) -> None:
    await insert(local)
    await mapper.map()
    hearer, stream, offer, _ = await mapper.select()
    stream.send(Nack(offer.token))
    await hearer.next()
    assert (await local.drop_select()).entry_id == offer.entry_id
    assert pinned(local) == MIB


async def test_an_insert_waits_for_memory_until_its_holder_is_gone(
    local: LookupBuffer, mapper: RawMapper
) -> None:
    await insert(local, nbytes=5 * MIB)
    await mapper.map()
    await taken(mapper)
    inserting = asyncio.create_task(insert(local, nbytes=5 * MIB))
    await until(lambda: local.statistics().waiting_inserts == 1)
    assert mapper.sock is not None
    mapper.sock.close()
    await inserting
    assert pinned(local) == 0


async def test_the_end_of_the_link_lets_nothing_go(
    local: LookupBuffer, mapper: RawMapper
) -> None:
    await insert(local)
    await mapper.map()
    pin = await taken(mapper)
    await mapper.link.aclose()
    await until(lambda: local.exporter._importers != set())
    assert pinned(local) == MIB
    mapper.release(pin)
    await until(lambda: pinned(local) == 0)
    await until(lambda: local.exporter._door is None)


async def test_memory_stays_pinned_when_the_server_has_left(
    local: LookupBuffer,
) -> None:
    await insert(local)
    async with serve("tcp://127.0.0.1:0", lookup=local) as server:
        mapper = RawMapper(await dial(server.url, identity=name_of("consumer")))
        await mapper.map()
        await taken(mapper)
    assert pinned(local) == MIB
    await mapper.aclose()
    await until(lambda: pinned(local) == 0)


async def test_memory_that_a_peer_has_is_never_free_again_when_the_buffer_is_closed(
    local: LookupBuffer, mapper: RawMapper
) -> None:
    await insert(local)
    await mapper.map()
    await taken(mapper)
    local.abort()
    assert pinned(local) == MIB
    assert mapper.sock is not None
    assert await asyncio.get_running_loop().sock_recv(mapper.sock, 1) == b""
    assert pinned(local) == MIB


async def test_releasing_twice_lets_nothing_else_go(
    local: LookupBuffer, mapper: RawMapper
) -> None:
    await mapper.map()
    pins = []
    for value in (1.0, 2.0):
        await insert(local, value)
        pins.append(await taken(mapper))
    mapper.release(pins[0], pins[0])
    mapper.release(pins[0])
    await until(lambda: pinned(local) == MIB)
    assert list(local.statistics().mapped_by.values()) == [1]


@pytest.mark.parametrize("message", [struct.pack("!Q", 7), b"x", b"x" * 4097])
async def test_who_releases_what_it_never_had_is_hung_up_on(
    local: LookupBuffer, mapper: RawMapper, message: bytes
) -> None:
    await mapper.map()
    mapper.tell(message)
    assert mapper.sock is not None
    assert await asyncio.get_running_loop().sock_recv(mapper.sock, 1) == b""
    await insert(local)
    _, _, offer, _ = await mapper.select()
    assert offer.mapped is None
    assert mapper.link.is_open


async def test_a_system_without_such_sockets_shows_nothing(
    monkeypatch: pytest.MonkeyPatch, mapper: RawMapper
) -> None:
    monkeypatch.setattr(exporter, "has_fd_sockets", lambda: False)
    with pytest.raises(ValueError, match="no memory that could be mapped"):
        await mapper.ask()


async def test_a_process_without_files_to_spare_shows_its_memory_to_later_links(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    local: LookupBuffer,
    mappable: Server,
) -> None:
    def refuse() -> None:
        raise OSError(errno.EMFILE, "too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(exporter, "FdDoor", refuse)
        async with connect(mappable.url) as peer:
            assert peer.transport == "inline"
            await insert(local)
            assert (await peer.lookup.drop_select()).nbytes == MIB + 16
    assert caplog.text.count("too many open files") == 1
    caplog.clear()  # the error is kept there, and by it the memory
    async with connect(mappable.url) as peer:
        assert peer.transport == "map"


@pytest.fixture
async def peer(mappable: Server) -> AsyncIterator[Peer]:
    async with connect(mappable.url, reconnect_s=0) as peer:
        assert peer.transport == "map"
        yield peer


async def insert_one(buffer: LookupBuffer) -> None:
    tensor = torch.ones(MIB, dtype=torch.uint8)
    await buffer.insert([1, 2], None, tensor, None, None)


async def views_of(local: LookupBuffer, peer: Peer, count: int) -> list[KVEntry]:
    """Take so many entries as views, and one, the first, that is let go at once."""
    await insert_one(local)
    await peer.lookup.drop_select()
    entries = []
    for _ in range(count):
        await insert_one(local)
        async with peer.lookup.drop_select() as entry:
            entries.append(entry)
    await until(lambda: pinned(local) == count * MIB)
    return entries


def choke(memory: MappedMemory) -> None:
    """Fill its connection with the end of the first pin, which is nothing new."""
    with contextlib.suppress(BlockingIOError):
        while True:
            memory._sock.send(struct.pack("!Q", 1))


async def hung_up(memory: MappedMemory, fd: int, local: LookupBuffer) -> None:
    """Wait for the end of its connection; nothing of it is left in the loop."""
    await until(lambda: memory._sock.fileno() < 0)
    await until(lambda: pinned(local) == 0)
    assert not asyncio.get_running_loop().remove_writer(fd)


async def test_what_a_full_connection_was_not_told_is_told_by_its_end(
    local: LookupBuffer, peer: Peer
) -> None:
    views = await views_of(local, peer, 1)
    memory = memory_of(peer)
    fd = memory._sock.fileno()
    memory.link_over()
    choke(memory)
    views.clear()
    assert memory._sock.fileno() == fd
    await hung_up(memory, fd, local)


async def test_a_fork_while_what_was_written_is_dropped_keeps_nothing(
    local: LookupBuffer, peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, release = memory_of(peer), MappedFile.release

    def release_while_forking(file: MappedFile, claim: Claim) -> None:
        memory.keep_for_child()
        release(file, claim)

    monkeypatch.setattr(MappedFile, "release", release_while_forking)
    await insert_one(local)
    async with peer.lookup.drop_select() as entry:
        pass
    del entry
    await until(lambda: pinned(local) == 0)


async def test_two_threads_that_let_the_last_two_go_at_once_hang_up_once(
    monkeypatch: pytest.MonkeyPatch, local: LookupBuffer, peer: Peer
) -> None:
    class Meeting(set[int]):
        def discard(self, number: object) -> None:
            super().discard(number)
            meeting.wait(10)

    meeting = threading.Barrier(2)
    views = await views_of(local, peer, 2)
    memory = memory_of(peer)
    fd = memory._sock.fileno()
    memory.link_over()
    choke(memory)
    monkeypatch.setattr(memory, "_live", Meeting(memory._live))
    threads = [threading.Thread(target=[view].clear) for view in views]
    views.clear()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    await hung_up(memory, fd, local)


async def test_a_connection_that_was_closed_is_not_written_to_later(
    local: LookupBuffer, peer: Peer
) -> None:
    views = await views_of(local, peer, 1)
    memory = memory_of(peer)
    fd = memory._sock.fileno()
    choke(memory)
    views.clear()
    await asyncio.sleep(0)
    choke(memory)
    memory.link_over()
    memory._tell_unsent()  # in the same tick, by the loop: and it is full again
    await hung_up(memory, fd, local)


async def test_a_copy_of_a_view_in_a_child_tells_nobody_of_its_end(
    monkeypatch: pytest.MonkeyPatch, local: LookupBuffer, peer: Peer
) -> None:
    views = await views_of(local, peer, 1)
    memory = memory_of(peer)
    with monkeypatch.context() as patch:
        patch.setattr(memory, "_pid", os.getpid() + 1)
        views.clear()
    for _ in range(20):
        await asyncio.sleep(0)
    assert pinned(local) == MIB
    memory.release(2)
    await until(lambda: pinned(local) == 0)


LARGE = torch.ones(2**18)


async def test_who_reads_the_nonce_is_accepted(mapper: RawMapper) -> None:
    file = await mapper.fetch(await mapper.ask())
    assert await mapper.say(Proved(file.nonce)) == Accepted()


async def test_a_wrong_nonce_leaves_the_link_to_its_lanes(
    local: LookupBuffer, mapper: RawMapper
) -> None:
    await mapper.fetch(await mapper.ask())
    assert isinstance(await mapper.say(Proved(b"x" * 16)), Failure)
    await local.insert([1], None, LARGE, None, None)
    assert (await mapper.select())[2].mapped is None


async def test_the_right_nonce_without_a_connection_is_no_mapping(
    local: LookupBuffer, mapper: RawMapper
) -> None:
    await mapper.ask()
    file = local.exporter._file
    assert file is not None
    assert isinstance(await mapper.say(Proved(file.nonce)), Failure)


async def test_the_right_nonce_is_nothing_when_the_connection_has_gone(
    local: LookupBuffer, mapper: RawMapper
) -> None:
    mappable = await mapper.ask()
    file = await mapper.fetch(mappable)
    assert mapper.sock is not None
    mapper.sock.close()
    with pytest.raises(Exception, match="file|descriptors"):
        _, fd = await fetch_file(mappable.address, mappable.ticket)
        os.close(fd)
    assert isinstance(await mapper.say(Proved(file.nonce)), Failure)


async def test_a_buffer_that_was_closed_shows_nothing(local: LookupBuffer) -> None:
    async with serve("tcp://127.0.0.1:0", lookup=local) as server:
        mapper = RawMapper(await dial(server.url, identity=name_of("consumer")))
        local.abort()
        with pytest.raises(ValueError, match="no invitation"):
            await mapper.ask()
        await mapper.aclose()


THREES = torch.full((MIB // 4,), 3.0)


async def test_an_offer_says_where_the_tensors_lie(
    local: LookupBuffer, mapper: RawMapper
) -> None:
    await local.insert([1], None, THREES, None, None)
    file = await mapper.map()
    _, _, offer, body = await mapper.select()
    assert offer.mapped is not None
    (place,) = msgspec.msgpack.decode(body[-offer.mapped.nbytes :], type=list[Place])
    first = file.pieces(place, MIB)[0][:4].tobytes()
    assert struct.unpack("f", first) == (3.0,)
    assert offer.mapped.edges == edges_of(file.memory, [place], [MIB])


async def test_small_entries_ride_with_their_offer_as_ever(
    local: LookupBuffer, mapper: RawMapper
) -> None:
    await local.insert([1], None, torch.ones(100), None, None)
    await mapper.map()
    _, _, offer, _ = await mapper.select()
    assert offer.inline and offer.mapped is None


async def test_a_stream_gets_its_tensors_by_lanes(
    local: LookupBuffer, mapper: RawMapper
) -> None:
    await local.insert([1], None, THREES, None, None)
    await mapper.map()
    hearer = Hearer()
    mapper.link.open_stream(hearer, Select(has_key=False, stream=True))
    assert "mapped=None" in str(await hearer.next())


async def test_a_grant_of_what_is_mapped_has_it_sent(
    local: LookupBuffer, mapper: RawMapper
) -> None:
    await local.insert([1], None, THREES, None, None)
    await mapper.map()
    hearer, stream, offer, _ = await mapper.select()
    target, payload = torch.zeros_like(THREES), mapper.link.payload
    payload.announce(offer.transfer)
    payload.receive(offer.transfer, 0, bytes_of(target), lambda *_: None)
    stream.send(Grant(offer.transfer))
    assert isinstance((await hearer.next())[0], Sent)
    await until(lambda: target.equal(THREES))


async def test_a_peer_with_too_many_pins_gets_the_next_entry_by_its_lanes(
    monkeypatch: pytest.MonkeyPatch, local: LookupBuffer, mapper: RawMapper
) -> None:
    monkeypatch.setattr(exporter, "MAX_PINS", 1)
    await local.insert([1], None, THREES, None, None)
    await mapper.map()
    _, stream, offer, _ = await mapper.select()
    stream.send(Nack(offer.token))
    assert (await mapper.select())[2].mapped is None


async def test_an_offer_that_is_too_long_pins_nothing(
    monkeypatch: pytest.MonkeyPatch, local: LookupBuffer, mapper: RawMapper
) -> None:
    def refuse(max_body_bytes: int, body: bytes) -> None:
        raise EntryTooLarge(nbytes=len(body), max_bytes=max_body_bytes)

    await local.insert([1], None, THREES, None, None)
    await mapper.map()
    monkeypatch.setattr("asynckv.buffers.serving.select.check_body", refuse)
    hearer = Hearer()
    mapper.link.open_stream(hearer, Select(has_key=False))
    assert isinstance((await hearer.next())[0], Failure)
    assert not local.statistics().mapped_by


def test_memory_of_the_heap_has_no_place() -> None:
    assert exporter.place_of(Region(10, None)) is None
