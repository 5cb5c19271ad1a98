"""Entries that a peer delivers, offer by offer."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import pytest
import torch

from asynckv.buffers.lookup import LookupBuffer
from asynckv.buffers.remote.peer import connect
from asynckv.buffers.remote.select import Selecting
from asynckv.buffers.serve import serve
from asynckv.errors import ChecksumError, EntryTooLarge, LeaseLost
from asynckv.links.link import LinkStream
from asynckv.protocol.frames import (
    Accepted,
    Ack,
    Cancel,
    Cancelled,
    Complete,
    Frame,
    Offer,
    OpeningFrame,
    Retract,
    Took,
)
from asynckv.protocol.transfer_frames import Eager, Grant, Sent
from asynckv.protocol.wire import digest_of
from asynckv.tensors.views import spec_of
from asynckv.testing.blocked import until, until_blocked
from asynckv.transfers.delivery import Delivery, ReceiveBudget
from asynckv.transfers.queries import make_query
from asynckv.types import TensorSpec
from harness.bodies import body_with
from harness.link_pairs import LinkPair, linked
from harness.no_routes import NoRoutes

MIB = 2**20


def selecting_on(pair: LinkPair, budget: ReceiveBudget) -> Selecting:
    return Selecting(pair.near, make_query([1], None), {}, NoRoutes(budget=budget))


async def begun(
    pair: LinkPair,
    budget: ReceiveBudget,
    into: Mapping[str, torch.Tensor] | None = None,
    *,
    streams: bool = False,
) -> tuple[Selecting, asyncio.Task[Delivery], LinkStream]:
    """Ask for a delivery, and return also the stream on which the peer heard of it."""
    query = make_query([1], None)
    selecting = Selecting(
        *(pair.near, query, into or {}, NoRoutes(budget=budget)), streams=streams
    )
    delivered = asyncio.create_task(selecting.delivered())
    await until(lambda: bool(pair.service.asked))
    return selecting, delivered, pair.service.asked[0][0]


def offer(
    stream: LinkStream,
    transfer: int,
    nbytes: int,
    *,
    inline: bool,
    lent: Mapping[str, torch.Tensor] | None = None,
) -> None:
    specs = {"key": TensorSpec((nbytes,), "uint8")}
    specs |= {n: spec_of(t) for n, t in (lent or {}).items()}
    pieces = [memoryview(bytes(nbytes))] if inline else []
    digests = [b"wrong"] + [b""] * (len(specs) - 1)
    body = body_with(specs, pieces, digests=digests)
    stream.send(Offer(transfer=transfer, inline=inline, token=b"t"), body)


async def frames_of(pair: LinkPair, count: int) -> list[Frame]:
    await until(lambda: len(pair.service.hearers[0].frames) >= count)
    return [frame for frame, _ in pair.service.hearers[0].frames]


async def small_delivery(
    pair: LinkPair, budget: ReceiveBudget
) -> tuple[Selecting, Delivery]:
    """Let a small entry be delivered by payload."""
    selecting, delivered, stream = await begun(pair, budget)
    offer(stream, 2, 100, inline=False)
    assert await frames_of(pair, 1) == [Grant(2)]
    stream.send(Eager(2, (0,), (digest_of(bytes(100)),)), bytes(100))
    return selecting, await delivered


async def test_bytes_that_changed_are_refused_and_given_back() -> None:
    def answer(stream: LinkStream, frame: OpeningFrame, body: bytes) -> None:
        offer(stream, 2, 100, inline=True)

    async with linked("mem://", answer) as pair:
        selecting = selecting_on(pair, ReceiveBudget(MIB))
        with pytest.raises(ChecksumError):
            await selecting.delivered()
        selecting.cancel()
        assert await frames_of(pair, 1) == [Cancel()]


async def test_a_retracted_offer_leaves_the_budget_exact() -> None:
    budget = ReceiveBudget(MIB)
    async with linked("mem://", lambda *_: None) as pair:
        selecting, delivered, stream = await begun(pair, budget)
        offer(stream, 2, MIB, inline=False)
        await frames_of(pair, 1)
        stream.send(Retract(2))
        await until(lambda: budget.used_bytes == 0)
        offer(stream, 4, MIB, inline=False)
        await frames_of(pair, 2)
        assert budget.used_bytes == MIB and not delivered.done()
        selecting.cancel()
        delivered.cancel()
        await asyncio.wait({delivered})
    assert budget.used_bytes == 0


async def test_an_offer_retracted_while_it_waits_for_the_budget_takes_nothing(
    pair: LinkPair,
) -> None:
    budget = ReceiveBudget(MIB)
    await budget.reserve(10)
    selecting, delivered, stream = await begun(pair, budget)
    offer(stream, 2, MIB, inline=False)
    await until(lambda: selecting.delivery is not None)
    stream.send(Retract(2))
    await until(lambda: selecting.delivery is None)
    budget.release(10)
    await until(lambda: budget.used_bytes == 0)
    await until_blocked(delivered)
    assert budget.used_bytes == 0 and not pair.service.hearers[0].frames
    delivered.cancel()
    await asyncio.wait({delivered})


async def test_a_delivery_that_the_peer_gives_up_is_a_lost_lease() -> None:
    def answer(stream: LinkStream, frame: OpeningFrame, body: bytes) -> None:
        offer(stream, 2, 2**17, inline=False)
        stream.send(Cancelled())

    async with linked("mem://", answer) as pair:
        with pytest.raises(LeaseLost, match="gave the delivery up"):
            await selecting_on(pair, ReceiveBudget(MIB)).delivered()


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


async def test_an_offer_retracted_while_lent_memory_falls_quiet_is_not_charged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    budget, into = ReceiveBudget(MIB), {"hidden": torch.zeros(1)}
    async with linked("mem://", lambda *_: None) as pair:
        selecting, delivered, stream = await begun(pair, budget, into)
        quiet = asyncio.Event()
        offer(stream, 2, MIB, inline=False, lent=into)
        await frames_of(pair, 1)
        monkeypatch.setattr(pair.near.payload, "quiesce", lambda _: quiet.wait())
        for retracted, offered in ((2, 4), (4, 6)):
            stream.send(Retract(retracted))
            offer(stream, offered, MIB, inline=False, lent=into)
            await until_blocked(delivered)
        quiet.set()
        await frames_of(pair, 2)
        assert budget.used_bytes == MIB
        selecting.cancel()
        delivered.cancel()
        await asyncio.wait({delivered})
    assert budget.used_bytes == 0


async def test_an_entry_may_be_complete_before_there_is_room_for_it(
    pair: LinkPair,
) -> None:
    budget = ReceiveBudget(MIB)
    await budget.reserve(10)
    selecting, delivered, stream = await begun(pair, budget)
    data = memoryview(bytearray(MIB))
    body = body_with({"key": TensorSpec((MIB,), "uint8")})
    stream.send(Offer(2, inline=False, token=b"t", complete=False), body)
    stream.send(Complete(2))
    await until(lambda: selecting.delivery is not None)
    await until_blocked(delivered)
    budget.release(10)
    assert await frames_of(pair, 1) == [Grant(2)]
    pair.far.payload.send(
        2, 0, data, lambda digest, error: stream.send(Sent(2, 0, digest))
    )
    assert (await delivered).is_whole
    selecting.cancel()


async def test_a_small_entry_by_payload_is_charged_until_it_is_taken(
    pair: LinkPair,
) -> None:
    budget = ReceiveBudget(MIB)
    selecting, delivery = await small_delivery(pair, budget)
    assert budget.used_bytes == 100
    selecting.settle_at_once(delivery)
    assert await frames_of(pair, 2) == [Grant(2), Took(b"t")]
    assert budget.used_bytes == 0


async def test_what_is_settled_at_once_counts_as_no_open_stream(pair: LinkPair) -> None:
    selecting, delivery = await small_delivery(pair, ReceiveBudget(MIB))
    assert pair.near._session._own_count == 1
    selecting.settle_at_once(delivery)
    assert pair.near._session._own_count == 0


async def test_what_is_settled_on_a_link_that_was_cut_hears_of_no_loss(
    pair: LinkPair,
) -> None:
    selecting, delivery = await small_delivery(pair, ReceiveBudget(MIB))
    pair.near.abort()
    selecting.settle_at_once(delivery)
    await pair.near.wait_closed()
    assert selecting._error is None


async def test_what_belongs_to_no_standing_offer_is_ignored(pair: LinkPair) -> None:
    budget = ReceiveBudget(MIB)
    selecting, delivered, stream = await begun(pair, budget)
    for late in (Sent(1, 0, b""), Eager(1, (0,)), Complete(1), Retract(1)):
        stream.send(late)
    offer(stream, 2, MIB, inline=False)
    for late in (Sent(1, 0, b""), Complete(1), Retract(1)):
        stream.send(late)
    assert await frames_of(pair, 1) == [Grant(2)]
    assert selecting.delivery is not None and not delivered.done()
    delivered.cancel()


async def test_what_comes_late_of_one_offer_is_not_of_the_next(pair: LinkPair) -> None:
    _, delivered, stream = await begun(pair, ReceiveBudget(MIB))
    offer(stream, 2, 100, inline=False)
    assert await frames_of(pair, 1) == [Grant(2)]
    stream.send(Eager(1, (0,), (b"another",)), bytes(100))
    stream.send(Eager(2, (0,), (digest_of(bytes(100)),)), bytes(100))
    assert (await delivered).is_whole and pair.near.is_open


async def test_bytes_that_changed_on_a_lane_are_refused(pair: LinkPair) -> None:
    _, delivered, stream = await begun(pair, ReceiveBudget(MIB))
    offer(stream, 2, MIB, inline=False)
    await frames_of(pair, 1)
    pair.far.payload.send(2, 0, memoryview(bytearray(MIB)), lambda *_: None)
    stream.send(Sent(2, 0, b"wrong"))
    with pytest.raises(ChecksumError):
        await delivered


async def left_early(pair: LinkPair) -> tuple[Selecting, Delivery, LinkStream]:
    """Return a stream whose one part has not come yet."""
    budget = ReceiveBudget(MIB)
    selecting, delivered, stream = await begun(pair, budget, streams=True)
    offer(stream, 2, MIB, inline=False)
    assert await frames_of(pair, 1) == [Grant(2)]
    return selecting, await delivered, stream


def send_wrong_bytes(pair: LinkPair, stream: LinkStream) -> None:
    pair.far.payload.send(2, 0, memoryview(bytearray(MIB)), lambda *_: None)
    stream.send(Sent(2, 0, b"wrong"))


async def test_who_leaves_without_a_part_that_changed_has_acknowledged(
    pair: LinkPair,
) -> None:
    selecting, delivery, stream = await left_early(pair)
    send_wrong_bytes(pair, stream)
    with pytest.raises(ChecksumError):
        while True:
            await selecting.changed()
    leaving = asyncio.create_task(selecting.acknowledge(delivery))
    assert await frames_of(pair, 2) == [Grant(2), Ack(b"t")]
    stream.send(Accepted())
    await leaving


async def test_a_part_that_changes_while_the_answer_is_under_way_is_not_missed(
    pair: LinkPair,
) -> None:
    selecting, delivery, stream = await left_early(pair)
    leaving = asyncio.create_task(selecting.acknowledge(delivery))
    assert await frames_of(pair, 2) == [Grant(2), Ack(b"t")]
    send_wrong_bytes(pair, stream)
    await until_blocked(leaving)
    stream.send(Accepted())
    await leaving
