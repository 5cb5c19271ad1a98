from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
import torch

from asynckv.buffers.lookup import LookupBuffer
from asynckv.buffers.manifest import pack
from asynckv.buffers.queries import make_query
from asynckv.buffers.receive_budget import ReceiveBudget
from asynckv.buffers.remote import Peer, connect
from asynckv.buffers.selecting import Selecting
from asynckv.buffers.serve import Server, serve
from asynckv.errors import ChecksumError, EntryTooLarge, LeaseLost
from asynckv.links.link import Link
from asynckv.links.requests import LinkStream
from asynckv.protocol.frames import (
    Accepted,
    Ack,
    Cancel,
    Frame,
    Noted,
    Offer,
    OpeningFrame,
    Reached,
    Retract,
    TensorRecord,
    Took,
)
from asynckv.testing.blocked import until, until_blocked
from asynckv.testing.link_pairs import LinkPair, linked
from asynckv.testing.pairs import Peers
from asynckv.types import TensorSpec

FarLink = Callable[[Server, Peer], Link]
CutWhen = Callable[[Link, type], None]
MIB = 2**20


def selecting_on(pair: LinkPair, budget: ReceiveBudget) -> Selecting:
    return Selecting(pair.near, make_query([1], None), {}, budget)


def offer(stream: LinkStream, transfer: int, nbytes: int, *, inline: bool) -> None:
    record = TensorRecord("key", TensorSpec((nbytes,), "uint8"), b"wrong")
    body = pack([record], None, None, [memoryview(bytes(nbytes))] if inline else [])
    stream.send(Offer(transfer=transfer, inline=inline, token=b"t"), body)


async def frames_of(pair: LinkPair, count: int) -> list[Frame]:
    await until(lambda: len(pair.service.hearers[0].frames) >= count)
    return [frame for frame, _ in pair.service.hearers[0].frames]


async def test_bytes_that_changed_are_refused_and_given_back() -> None:
    def answer(stream: LinkStream, frame: OpeningFrame, body: bytes) -> None:
        offer(stream, 2, 100, inline=True)

    async with linked("mem://", answer) as pair:
        selecting = selecting_on(pair, ReceiveBudget(MIB))
        with pytest.raises(ChecksumError):
            await selecting.whole()
        selecting.cancel()
        assert await frames_of(pair, 1) == [Cancel()]


async def test_a_retracted_offer_leaves_the_budget_exact() -> None:
    budget = ReceiveBudget(MIB)
    async with linked("mem://", lambda *_: None) as pair:
        selecting = selecting_on(pair, budget)
        whole = asyncio.create_task(selecting.whole())
        await until(lambda: bool(pair.service.asked))
        stream = pair.service.asked[0][0]
        offer(stream, 2, MIB, inline=False)
        await frames_of(pair, 1)
        stream.send(Retract(2))
        await until(lambda: budget.used_bytes == 0)
        offer(stream, 4, MIB, inline=False)
        await frames_of(pair, 2)
        assert budget.used_bytes == MIB and not whole.done()
        selecting.cancel()
        whole.cancel()
        await asyncio.wait({whole})
    assert budget.used_bytes == 0


async def test_an_offer_retracted_while_it_waits_for_the_budget_takes_nothing() -> None:
    budget = ReceiveBudget(MIB)
    await budget.reserve(10)
    async with linked("mem://", lambda *_: None) as pair:
        selecting = selecting_on(pair, budget)
        whole = asyncio.create_task(selecting.whole())
        await until(lambda: bool(pair.service.asked))
        stream = pair.service.asked[0][0]
        offer(stream, 2, MIB, inline=False)
        await until(lambda: selecting.delivery is not None)
        stream.send(Retract(2))
        await until(lambda: selecting.delivery is None)
        budget.release(10)
        await until_blocked(whole)
        assert budget.used_bytes == 0 and not pair.service.hearers[0].frames
        whole.cancel()
        await asyncio.wait({whole})


async def test_a_second_offer_without_a_retraction_breaks_the_link() -> None:
    def answer(stream: LinkStream, frame: OpeningFrame, body: bytes) -> None:
        offer(stream, 2, MIB, inline=False)
        offer(stream, 4, MIB, inline=False)

    async with linked("mem://", answer) as pair:
        selecting_on(pair, ReceiveBudget(MIB))
        await until(lambda: not pair.near.is_open)
        assert "second offer" in str(pair.near.error)


async def test_an_entry_beyond_the_receive_bound_is_refused_and_stays(
    local: LookupBuffer,
) -> None:
    await local.insert([1], None, torch.ones(MIB), None, None)
    async with (
        serve("mem://", lookup=local) as server,
        connect(server.url, max_bytes="1MiB") as peer,
    ):
        with pytest.raises(EntryTooLarge):
            await peer.lookup.drop_select([1])
        into = {"key": torch.zeros(MIB)}
        entry = await peer.lookup.drop_select([1], into=into)
        assert entry.key is into["key"] and bool(into["key"].all())
        assert peer.budget.used_bytes == 0


@pytest.mark.parametrize(("kind", "nbytes"), [(Took, 10), (Ack, MIB), (Reached, MIB)])
async def test_a_link_cut_around_the_acknowledgement_takes_the_entry_once(
    peers: Peers, local: LookupBuffer, cut_when: CutWhen, kind: type, nbytes: int
) -> None:
    await local.insert([1], None, torch.ones(nbytes), None, None)
    link = await peers.consumer.link()
    cut_when(link, kind)
    entry = await peers.consumer.lookup.drop_select([1])
    assert torch.equal(entry.key, torch.ones(nbytes))  # type: ignore[arg-type]
    await until(lambda: not local.statistics().leased)
    assert local.statistics().entries == (kind is Took)
    assert peers.consumer.budget.used_bytes == 0


async def test_a_noted_that_never_came_is_asked_for_on_the_next_link(
    peers: Peers, local: LookupBuffer, far_link: FarLink, cut_when: CutWhen
) -> None:
    await local.insert([1], None, torch.ones(MIB), None, None)
    cut_when(far_link(peers.server, peers.consumer), Noted)
    entry = await peers.consumer.lookup.drop_select([1])
    assert entry.attempt == 1 and local.statistics().acknowledged == 1


@pytest.mark.parametrize("streams", [False, True])
async def test_a_link_lost_inside_the_block_is_told_at_its_end(
    peers: Peers, local: LookupBuffer, *, streams: bool
) -> None:
    await local.insert([1], None, torch.ones(10), None, None)
    lookup = peers.consumer.lookup
    enter = lookup.open_drop_select if streams else lookup.drop_select
    with pytest.raises(LeaseLost):
        async with enter([1]):
            (await peers.consumer.link()).abort()
    assert (await lookup.drop_select([1])).attempt == 2


async def test_an_acceptance_lost_with_the_link_is_a_lost_lease(
    peers: Peers, local: LookupBuffer, far_link: FarLink, cut_when: CutWhen
) -> None:
    await local.insert([1], None, torch.ones(10), None, None)
    cut_when(far_link(peers.server, peers.consumer), Accepted)
    with pytest.raises(LeaseLost):
        async with peers.consumer.lookup.drop_select([1]):
            pass
