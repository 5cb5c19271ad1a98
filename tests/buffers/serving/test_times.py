"""How long requests took at a server: counted once, when they are answered."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import torch

from asynckv import (
    EntryTooLarge,
    LookupBuffer,
    Peer,
    Server,
    StoreBuffer,
    connect,
    serve,
)
from asynckv.protocol.frames import Get, Offer
from asynckv.testing import until
from asynckv.testing.lookup_checks.values import MIB, cancelled, started
from harness.link_pairs import Hearer, dialled


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    async with (
        LookupBuffer(4 * MIB) as lookup,
        StoreBuffer(4 * MIB) as store,
        serve("mem://", lookup=lookup, store=store) as server,
    ):
        yield server


@pytest.fixture
async def peer(server: Server) -> AsyncIterator[Peer]:
    async with connect(server.url) as peer:
        yield peer


def counts_of(server: Server) -> dict[str, int]:
    """Return how many of each were counted, if any were."""
    found = {name: one.count for name, one in server.request_latencies.items()}
    return {name: count for name, count in found.items() if count}


@pytest.mark.parametrize("nbytes", [64, MIB], ids=["inline", "by_payload"])
async def test_a_put_and_a_get_are_counted_once_each(
    server: Server, peer: Peer, nbytes: int
) -> None:
    await peer.store.put("key", torch.ones(nbytes, dtype=torch.uint8))
    await peer.store.get("key")
    await until(lambda: counts_of(server) == {"put": 1, "get": 1})


async def test_a_miss_and_a_question_are_counted(server: Server, peer: Peer) -> None:
    await peer.store.get("nothing")
    await peer.store.contains(["nothing"])
    assert counts_of(server) == {"get": 1, "contains": 1}


async def test_an_entry_is_counted_as_it_comes_and_goes(
    server: Server, peer: Peer
) -> None:
    key = torch.ones(MIB, dtype=torch.uint8)
    await peer.lookup.insert([1], None, key, None, None)
    await peer.lookup.drop_select([1])
    assert counts_of(server) == {"insert": 1}


async def test_a_select_lasts_until_there_is_a_match(
    server: Server, peer: Peer
) -> None:
    waiting = await started(take(peer))
    assert counts_of(server) == {}
    await peer.lookup.insert([1], None, None, None, None)
    await waiting
    assert counts_of(server) == {"insert": 1}


async def test_what_is_cancelled_or_fails_is_not_counted(
    server: Server, peer: Peer
) -> None:
    waiting = await started(take(peer))
    await cancelled(waiting)
    with pytest.raises(EntryTooLarge):
        await peer.store.put("key", torch.ones(8 * MIB, dtype=torch.uint8))
    await peer.store.contains(["key"])  # by then both have ended there
    assert counts_of(server) == {"contains": 1}


async def test_a_value_that_is_cut_off_is_not_counted(
    server: Server, peer: Peer
) -> None:
    await peer.store.put("key", torch.ones(MIB, dtype=torch.uint8))
    async with dialled(server.url) as link:
        link.open_stream(hearer := Hearer(), Get("key"))
        assert not (await hearer.next_of(Offer))[0].inline
        link.abort()
    await until(lambda: len(server.peers) == 1)
    assert counts_of(server) == {"put": 1}


async def test_other_requests_are_not_timed(server: Server, peer: Peer) -> None:
    await peer.lookup.peek([1])
    await peer.store.delete("key")
    assert counts_of(server) == {}


async def take(peer: Peer) -> None:
    await peer.lookup.drop_select([1])
