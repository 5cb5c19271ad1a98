from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from asynckv.buffers.serve import serve
from asynckv.buffers.store import StoreBuffer
from asynckv.links.dial import dial
from asynckv.links.link import Link, LinkStream
from asynckv.protocol.frames import Cancel, Cancelled, Get, Offer
from asynckv.protocol.transfer_frames import Grant, Sent
from asynckv.testing.blocked import until
from asynckv.testing.lookup_checks.values import MIB, noise
from harness.link_pairs import Hearer, name_of


@pytest.fixture
async def store() -> AsyncIterator[StoreBuffer]:
    async with StoreBuffer("8MiB") as store:
        await store.put("key", noise(MIB))
        yield store


@pytest.fixture
async def link(store: StoreBuffer) -> AsyncIterator[Link]:
    async with serve("tcp://127.0.0.1:0", store=store) as server:
        link = await dial(server.url, identity=name_of("peer"))
        yield link
        await link.aclose()


async def offered(link: Link) -> tuple[LinkStream, Hearer, int]:
    hearer = Hearer()
    stream = link.open_stream(hearer, Get("key"))
    offer, _ = await hearer.next()
    assert isinstance(offer, Offer) and offer.mapped is None and not offer.inline
    return stream, hearer, offer.transfer


async def test_a_get_that_is_given_up_is_read_no_further(
    store: StoreBuffer, link: Link
) -> None:
    stream, hearer, transfer = await offered(link)
    stream.send(Grant(transfer))
    stream.send(Cancel())
    # It may have left before the cancel was heard.
    await until(lambda: hearer.frames[-1] == (Cancelled(), b""))
    await store.put("other", noise(8 * MIB))  # which needs all of the room


async def test_what_only_a_sender_says_breaks_the_link(link: Link) -> None:
    stream, _, transfer = await offered(link)
    stream.send(Sent(transfer, 0, b""))
    await until(lambda: not link.is_open)
    assert "no Sent belongs here" in str(link.error)


async def test_a_grant_of_memory_of_a_gpu_breaks_the_link(link: Link) -> None:
    stream, _, transfer = await offered(link)
    stream.send(Grant(transfer, "nccl", "off"))
    await until(lambda: not link.is_open)
    assert "memory that nothing leads to" in str(link.error)
