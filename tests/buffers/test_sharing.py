"""The side that shows its memory, against peers that say what they like."""

from __future__ import annotations

import asyncio
import errno
import struct

import pytest
import torch

from asynckv.buffers.lookup import LookupBuffer
from asynckv.buffers.remote.peer import connect
from asynckv.buffers.serve import Server, serve
from asynckv.links.dial import dial
from asynckv.protocol.frames import Accepted, Ack, Nack
from asynckv.sharing import exporter
from asynckv.testing.blocked import until
from harness.link_pairs import name_of
from harness.raw_maps import RawMapper

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
