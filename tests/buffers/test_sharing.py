"""The side that shows its memory, against peers that say what they like."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections.abc import AsyncIterator

import msgspec
import pytest
import torch

from asynckv.buffers import sharing as sharing_module
from asynckv.buffers.lookup import LookupBuffer
from asynckv.buffers.serve import Server, serve
from asynckv.links.dial import dial
from asynckv.links.fd_socket import fetch_file, has_fd_sockets
from asynckv.links.link import Link
from asynckv.protocol.frames import (
    Accepted,
    Ack,
    Cancel,
    Cancelled,
    Failure,
    Grant,
    Mappable,
    Mapped,
    Nack,
    Offer,
    OpenMap,
    Select,
)
from asynckv.protocol.values import Place
from asynckv.tensors.shared_file import MappedFile, edges_of
from asynckv.testing.blocked import until
from asynckv.testing.link_pairs import Hearer, name_of

pytestmark = pytest.mark.skipif(not has_fd_sockets(), reason="nothing to map here")

MIB = 2**20
ANY = Select(has_key=False)


class Consumer:
    """A peer without any of our good manners."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.sock: socket.socket | None = None
        self.file: MappedFile | None = None

    async def invited(self) -> tuple[Hearer, Mappable]:
        hearer = Hearer()
        self.stream = self.link.open_stream(hearer, OpenMap())
        frame, _ = await hearer.next()
        assert isinstance(frame, Mappable)
        return hearer, frame

    async def map(self) -> None:
        hearer, mappable = await self.invited()
        self.sock, fd = await fetch_file(mappable.address, mappable.ticket)
        self.file = MappedFile(fd, mappable.nbytes)
        self.stream.send(Mapped(self.file.nonce))
        assert isinstance((await hearer.next())[0], Accepted)

    async def select(self) -> tuple[Offer, bytes]:
        hearer = Hearer()
        self.selecting = self.link.open_stream(hearer, ANY)
        frame, body = await hearer.next()
        assert isinstance(frame, Offer)
        self.hearer = hearer
        return frame, body

    def release(self, *numbers: int) -> None:
        assert self.sock is not None
        self.sock.send(struct.pack(f"!{len(numbers)}Q", *numbers))


@pytest.fixture
async def buffer() -> AsyncIterator[LookupBuffer]:
    async with LookupBuffer(4 * MIB, drain_s=0) as buffer:
        yield buffer


@pytest.fixture
async def server(buffer: LookupBuffer) -> AsyncIterator[Server]:
    async with serve("tcp://127.0.0.1:0", lookup=buffer) as server:
        yield server


@pytest.fixture
async def consumer(server: Server) -> AsyncIterator[Consumer]:
    consumer = Consumer(await dial(server.url, identity=name_of("consumer")))
    yield consumer
    if consumer.sock is not None:
        consumer.sock.close()
    await consumer.link.aclose()


async def insert(buffer: LookupBuffer, value: float = 1.0, nbytes: int = MIB) -> None:
    tensor = torch.full((nbytes // 4,), value)
    await buffer.insert([1, 2], None, tensor, None, None)


async def test_an_offer_says_where_the_tensors_lie(
    buffer: LookupBuffer, consumer: Consumer
) -> None:
    await insert(buffer, 3.0)
    await consumer.map()
    offer, body = await consumer.select()
    assert offer.mapped is not None and consumer.file is not None
    (place,) = msgspec.msgpack.decode(body[-offer.mapped.nbytes :], type=list[Place])
    first = consumer.file.pieces(place, MIB)[0][:4].tobytes()
    assert struct.unpack("f", first) == (3.0,)
    assert offer.mapped.edges == edges_of(consumer.file.memory, [place], [MIB])


async def test_memory_is_pinned_until_it_is_released(
    buffer: LookupBuffer, consumer: Consumer
) -> None:
    await insert(buffer)
    await consumer.map()
    offer, _ = await consumer.select()
    consumer.selecting.send(Ack(offer.token))
    await consumer.hearer.next()
    assert buffer.statistics().pinned_bytes == MIB
    assert list(buffer.statistics().mapped_by.values()) == [1]
    assert offer.mapped is not None
    consumer.release(offer.mapped.pin)
    await until(lambda: buffer.statistics().pinned_bytes == 0)
    assert not buffer.statistics().mapped_by


async def test_memory_is_pinned_also_when_the_entry_goes_to_somebody_else(
    buffer: LookupBuffer, consumer: Consumer
) -> None:
    await insert(buffer)
    await consumer.map()
    offer, _ = await consumer.select()
    consumer.selecting.send(Nack(offer.token))
    await consumer.hearer.next()
    assert (await buffer.drop_select()).entry_id == offer.entry_id
    assert buffer.statistics().pinned_bytes == MIB


async def test_an_insert_waits_for_memory_until_its_holder_is_gone(
    buffer: LookupBuffer, consumer: Consumer
) -> None:
    await insert(buffer, nbytes=3 * MIB)
    await consumer.map()
    offer, _ = await consumer.select()
    consumer.selecting.send(Ack(offer.token))
    inserting = asyncio.create_task(insert(buffer, nbytes=3 * MIB))
    await until(lambda: buffer.statistics().waiting_inserts == 1)
    assert consumer.sock is not None
    consumer.sock.close()
    await inserting
    assert buffer.statistics().pinned_bytes == 0


async def test_the_end_of_the_link_lets_nothing_go(
    buffer: LookupBuffer, consumer: Consumer
) -> None:
    await insert(buffer)
    await consumer.map()
    offer, _ = await consumer.select()
    consumer.selecting.send(Ack(offer.token))
    await consumer.hearer.next()
    await consumer.link.aclose()
    assert offer.mapped is not None
    consumer.release(offer.mapped.pin)
    await until(lambda: buffer.statistics().pinned_bytes == 0)
    await until(lambda: buffer.sharing._door is None)


async def test_memory_stays_pinned_when_the_server_has_left(
    buffer: LookupBuffer,
) -> None:
    await insert(buffer)
    async with serve("tcp://127.0.0.1:0", lookup=buffer) as server:
        consumer = Consumer(await dial(server.url, identity=name_of("consumer")))
        await consumer.map()
        offer, _ = await consumer.select()
        consumer.selecting.send(Ack(offer.token))
        await consumer.hearer.next()
    assert buffer.statistics().pinned_bytes == MIB
    assert consumer.sock is not None
    consumer.sock.close()
    await until(lambda: buffer.statistics().pinned_bytes == 0)
    await consumer.link.aclose()


async def test_releasing_twice_lets_nothing_else_go(
    buffer: LookupBuffer, consumer: Consumer
) -> None:
    await consumer.map()
    pins = []
    for value in (1.0, 2.0):
        await insert(buffer, value)
        offer, _ = await consumer.select()
        consumer.selecting.send(Ack(offer.token))
        await consumer.hearer.next()
        assert offer.mapped is not None
        pins.append(offer.mapped.pin)
    consumer.release(pins[0], pins[0])
    consumer.release(pins[0])
    await until(lambda: buffer.statistics().pinned_bytes == MIB)
    assert list(buffer.statistics().mapped_by.values()) == [1]


@pytest.mark.parametrize("message", [struct.pack("!Q", 7), b"x", b"x" * 4097])
async def test_who_releases_what_it_never_had_is_hung_up_on(
    buffer: LookupBuffer, consumer: Consumer, message: bytes
) -> None:
    await consumer.map()
    assert consumer.sock is not None
    consumer.sock.send(message)
    assert await asyncio.get_running_loop().sock_recv(consumer.sock, 1) == b""
    await insert(buffer)
    offer, _ = await consumer.select()
    assert offer.mapped is None
    assert consumer.link.is_open


async def test_a_wrong_nonce_leaves_the_link_to_its_lanes(
    buffer: LookupBuffer, consumer: Consumer
) -> None:
    hearer, mappable = await consumer.invited()
    consumer.sock, fd = await fetch_file(mappable.address, mappable.ticket)
    os.close(fd)
    consumer.stream.send(Mapped(b"x" * 16))
    assert isinstance((await hearer.next())[0], Failure)
    await insert(buffer)
    assert (await consumer.select())[0].mapped is None


async def test_the_right_nonce_without_a_connection_is_no_mapping(
    buffer: LookupBuffer, consumer: Consumer
) -> None:
    hearer, _ = await consumer.invited()
    file = buffer.sharing._file
    assert file is not None
    consumer.stream.send(Mapped(file.nonce))
    assert isinstance((await hearer.next())[0], Failure)


async def test_a_link_maps_memory_only_once(consumer: Consumer) -> None:
    await consumer.map()
    again = Hearer()
    consumer.link.open_stream(again, OpenMap())
    assert "maps memory once" in str((await again.loss()).__cause__)


async def test_a_grant_for_mapped_memory_breaks_the_link(
    buffer: LookupBuffer, consumer: Consumer
) -> None:
    await insert(buffer)
    await consumer.map()
    offer, _ = await consumer.select()
    consumer.selecting.send(Grant(offer.transfer))
    assert "Grant" in str((await consumer.hearer.loss()).__cause__)


async def test_a_cancelled_mapping_is_none(
    buffer: LookupBuffer, consumer: Consumer
) -> None:
    hearer, _ = await consumer.invited()
    consumer.stream.send(Cancel())
    assert isinstance((await hearer.next())[0], Cancelled)
    assert buffer.sharing._door is None


async def test_a_peer_with_too_many_pins_gets_the_next_entry_by_its_lanes(
    monkeypatch: pytest.MonkeyPatch, buffer: LookupBuffer, consumer: Consumer
) -> None:
    monkeypatch.setattr(sharing_module, "MAX_PINS", 1)
    await insert(buffer)
    await consumer.map()
    offer, _ = await consumer.select()
    consumer.selecting.send(Nack(offer.token))
    assert (await consumer.select())[0].mapped is None


async def test_small_entries_ride_with_their_offer_as_ever(
    buffer: LookupBuffer, consumer: Consumer
) -> None:
    await insert(buffer, nbytes=4096)
    await consumer.map()
    offer, _ = await consumer.select()
    assert offer.inline and offer.mapped is None


async def test_a_server_of_payload_inline_shows_nothing(buffer: LookupBuffer) -> None:
    async with serve("tcp://127.0.0.1:0?payload=inline", lookup=buffer) as server:
        link = await dial(server.url, identity=name_of("consumer"))
        hearer = Hearer()
        link.open_stream(hearer, OpenMap())
        assert isinstance((await hearer.next())[0], Failure)
        await link.aclose()
