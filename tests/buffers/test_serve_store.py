from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import torch

from asynckv.buffers.serve import Server, serve
from asynckv.buffers.store import StoreBuffer
from asynckv.links.dial import dial
from asynckv.links.link import Link
from asynckv.protocol.frames import (
    Cancel,
    Cancelled,
    Delete,
    Done,
    Failure,
    Get,
    Grant,
    Offer,
    Put,
    Took,
)
from asynckv.testing.blocked import until, until_blocked
from asynckv.testing.link_pairs import Hearer, name_of
from asynckv.types import TensorSpec

MIB = 2**20


@pytest.fixture
async def store() -> AsyncIterator[StoreBuffer]:
    async with StoreBuffer("8MiB") as store:
        await store.put("key", torch.ones(MIB, dtype=torch.uint8))
        yield store


@pytest.fixture
async def server(store: StoreBuffer) -> AsyncIterator[Server]:
    async with serve("mem://", store=store) as server:
        yield server


@pytest.fixture
async def link(server: Server) -> AsyncIterator[Link]:
    link = await dial(server.url, identity=name_of("peer"))
    yield link
    await link.aclose()


async def test_bytes_that_changed_on_their_way_are_not_stored(
    store: StoreBuffer, link: Link
) -> None:
    hearer, transfer = Hearer(), link.new_transfer()
    spec = TensorSpec((MIB,), "uint8")
    stream = link.open_stream(hearer, Put("key", transfer, inline=False, spec=spec))
    assert await hearer.next() == (Grant(transfer), b"")
    link.payload.send(transfer, 0, memoryview(bytes(MIB)), lambda *_: None)
    stream.send(Done(transfer, 0, b"of other bytes.."))
    last, _ = await hearer.next()
    assert isinstance(last, Failure) and last.code == "ChecksumError"
    value = await store.get("key")
    assert value is not None and bool(value.all())


async def test_inline_bytes_that_changed_are_not_stored(link: Link) -> None:
    hearer = Hearer()
    put = Put("new", 1, inline=True, spec=TensorSpec((3,), "uint8"), digest=b"wrong")
    link.open_stream(hearer, put, b"abc")
    last, _ = await hearer.next()
    assert isinstance(last, Failure) and last.code == "ChecksumError"


async def test_a_body_that_is_not_the_tensor_breaks_the_link(link: Link) -> None:
    put = Put("new", 1, inline=True, spec=TensorSpec((3,), "uint8"))
    link.open_stream(Hearer(), put, b"four")
    await until(lambda: not link.is_open)
    assert "not the tensor it declares" in str(link.error)


async def test_a_value_that_is_read_outlives_its_key(
    store: StoreBuffer, server: Server, link: Link
) -> None:
    hearer = Hearer()
    stream = link.open_stream(hearer, Get("key"))
    offer, _ = await hearer.next()
    assert isinstance(offer, Offer)
    await store.delete("key")
    await store.put("other", torch.zeros(MIB, dtype=torch.uint8))
    target, landed = memoryview(bytearray(MIB)), []
    link.payload.receive(
        offer.transfer, 0, target, lambda digest, error: landed.append(digest)
    )
    stream.send(Grant(offer.transfer))
    done, _ = await hearer.next()
    await until(lambda: bool(landed))
    assert isinstance(done, Done) and [done.digest] == landed
    assert target[0] == target[-1] == 1
    stream.send(Took(b""))
    (services,) = server._services
    served = services.store
    await until(lambda: served is not None and not served.under_way)


@pytest.mark.parametrize("lost", [True, False])
async def test_a_get_that_is_given_up_unpins(
    store: StoreBuffer, server: Server, link: Link, *, lost: bool
) -> None:
    hearer = Hearer()
    stream = link.open_stream(hearer, Get("key"))
    await hearer.next()
    (services,) = server._services
    assert services.store is not None and services.store.under_way
    if lost:
        link.abort()
    else:
        stream.send(Cancel())
        assert await hearer.next() == (Cancelled(), b"")
    service = services.store
    await until(lambda: not service.under_way)


async def test_leaving_finishes_what_is_read(server: Server, link: Link) -> None:
    hearer = Hearer()
    stream = link.open_stream(hearer, Get("key"))
    await hearer.next()
    leaving = asyncio.create_task(server.aclose())
    await until_blocked(leaving)
    refused = Hearer()
    link.open_stream(refused, Delete("key"))
    last, _ = await refused.next()
    assert isinstance(last, Failure) and last.code == "BufferClosed"
    assert not leaving.done()
    stream.send(Cancel())
    await leaving
