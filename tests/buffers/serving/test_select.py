from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from asynckv.buffers.lookup import LookupBuffer
from asynckv.buffers.remote.peer import connect
from asynckv.buffers.serve import serve
from asynckv.buffers.serving import select
from asynckv.buffers.serving.select import ServedSelect, query_of
from asynckv.errors import EntryTooLarge, LeaseLost, RemoteProtocolError
from asynckv.links.dial import dial
from asynckv.links.link import Link, LinkStream
from asynckv.protocol.frames import (
    Ack,
    Cancel,
    Cancelled,
    Commit,
    Failure,
    Nack,
    Noted,
    Offer,
    Reached,
    Retract,
    Select,
    Took,
)
from asynckv.protocol.transfer_frames import Grant
from asynckv.testing.blocked import until
from asynckv.testing.pairs import Peers
from asynckv.types import TensorSpec
from harness.holders import draft_of
from harness.link_pairs import Hearer, name_of

MIB = 2**20
ANY = Select(has_key=False)


async def selected(link: Link) -> tuple[Hearer, LinkStream, Offer]:
    hearer = Hearer()
    stream = link.open_stream(hearer, ANY)
    frame, _ = await hearer.next()
    assert isinstance(frame, Offer)
    return hearer, stream, frame


def insert(local: LookupBuffer, nbytes: int = 10, **options: Any) -> Any:
    return local.insert([1], None, torch.ones(nbytes), None, None, **options)


@pytest.mark.parametrize(
    ("stale", "last"), [(Ack(b"stale"), Failure), (Nack(b"stale"), Cancelled)]
)
async def test_a_stale_word_gives_back_what_is_in_hand_now(
    local: LookupBuffer, link: Link, stale: Any, last: type
) -> None:
    await insert(local)
    hearer, stream, _ = await selected(link)
    stream.send(stale)
    assert isinstance((await hearer.next())[0], last)
    now = local.statistics()
    assert (now.leased, now.entries) == (0, 1)
    assert (await local.drop_select([1])).attempt == 2


async def test_a_stale_acknowledgement_ends_the_wait_for_the_next_entry(
    local: LookupBuffer, link: Link
) -> None:
    hearer = Hearer()
    stream = link.open_stream(hearer, ANY)
    stream.send(Ack(b"stale"))
    assert isinstance((await hearer.next())[0], Failure)
    assert local.statistics().waiting_selects == 0


async def test_what_was_taken_leaves_without_an_answer(
    local: LookupBuffer, link: Link
) -> None:
    await insert(local)
    hearer, stream, offer = await selected(link)
    stream.send(Took(offer.token))
    await until(lambda: local.statistics().acknowledged == 1)
    await insert(local)
    await selected(link)  # an answer would have come before this offer
    assert len(hearer.frames) == 1


async def test_taking_by_a_stale_token_gives_back_what_is_in_hand(
    local: LookupBuffer, link: Link
) -> None:
    await insert(local)
    _, stream, _ = await selected(link)
    stream.send(Took(b"stale"))
    await until(lambda: not local.statistics().leased)
    assert local.statistics().entries == 1


@pytest.mark.parametrize("confirm", [False, True])
async def test_what_was_taken_and_taken_back_costs_no_other_entry(
    local: LookupBuffer, confirm: bool
) -> None:
    await insert(local, entry_id="first")
    await insert(local, entry_id="second")
    async with serve("mem://", lookup=local) as server:
        link = await dial(server.url, identity=name_of("consumer"))
        _, _, offer = await selected(link)
        (services,) = server._services
        assert services.lookup is not None
        selects = services.lookup.selects
        (served,) = selects
        assert isinstance(served, ServedSelect)
        ack = Ack(offer.token, confirm=True) if confirm else Took(offer.token)
        served.on_frame(ack, b"")
        local.ledger.leases.void(local.ledger.table.entries["first"], "max_deliver")
        served.on_frame(Reached(offer.token), b"")
        await until(lambda: not selects)
        assert "second" in local.ledger.table.entries
        await link.aclose()


async def test_a_cancellation_while_it_settles_gives_back(
    local: LookupBuffer, link: Link
) -> None:
    await insert(local)
    hearer, stream, offer = await selected(link)
    stream.send(Ack(offer.token, confirm=True))
    await hearer.next()
    stream.send(Cancel())
    assert await hearer.next() == (Cancelled(), b"")
    assert (await local.drop_select([1])).attempt == 2


async def test_a_loss_while_it_settles_counts_as_reached(
    local: LookupBuffer, link: Link
) -> None:
    await insert(local)
    hearer, stream, offer = await selected(link)
    stream.send(Ack(offer.token, confirm=True))
    await hearer.next()
    link.abort()
    await until(lambda: local.statistics().acknowledged == 1)
    assert local.statistics().entries == 0


async def test_what_is_not_known_to_be_reached_in_time_counts_as_reached() -> None:
    async with LookupBuffer("1MiB", max_hold_s=0.05, drain_s=0) as local:
        await insert(local)
        async with serve("mem://", lookup=local) as server:
            link = await dial(server.url, identity=name_of("consumer"))
            hearer, stream, offer = await selected(link)
            stream.send(Ack(offer.token, confirm=True))
            assert await hearer.next() == (Noted(), b"")
            waiting = asyncio.create_task(local.drop_select([1]))
            await until(lambda: local.statistics().acknowledged == 1)
            assert local.statistics().entries == local.statistics().lapsed == 0
            waiting.cancel()
            await asyncio.wait({waiting})
            await link.aclose()


async def test_only_what_the_application_had_counts_towards_max_deliver(
    local: LookupBuffer, link: Link
) -> None:
    await insert(local)
    for reached in (False, True, False, True):
        hearer, stream, offer = await selected(link)
        stream.send(Reached(offer.token))
        stream.send(Nack(offer.token, reached=reached))
        await hearer.next()
    assert local.statistics().undeliverable == 1


async def test_a_grant_for_an_offer_that_was_retracted_is_ignored(
    local: LookupBuffer, link: Link
) -> None:
    with pytest.raises(LookupError):
        specs = {"key": TensorSpec((MIB,), "uint8")}
        async with local.open_insert([1], None, specs):
            hearer, stream, offer = await selected(link)
            raise LookupError
    assert await hearer.next() == (Retract(offer.transfer), b"")
    stream.send(Grant(offer.transfer))
    await insert(local)
    second, _ = await hearer.next()
    assert isinstance(second, Offer) and second.transfer != offer.transfer


async def test_a_lost_consumer_gives_back_and_waits_no_longer(
    local: LookupBuffer, link: Link
) -> None:
    await insert(local, MIB)
    await selected(link)
    link.open_stream(Hearer(), ANY)
    await until(lambda: local.statistics().waiting_selects == 1)
    link.abort()
    await until(lambda: local.statistics().leased == 0)
    assert local.statistics().waiting_selects == 0
    assert (await local.drop_select([1])).attempt >= 2


async def test_an_entry_that_no_frame_can_hold_is_refused_and_stays(
    peers: Peers, local: LookupBuffer
) -> None:
    await local.insert(range(1000), None, None, None, None)
    for services in peers.server._services:
        limits = services.link.limits
        services.link.limits = type(limits)(max_body_bytes=1000)
    with pytest.raises(EntryTooLarge):
        await peers.consumer.lookup.drop_select()
    assert local.statistics().entries == 1 and peers.consumer.is_connected


async def test_what_was_held_for_too_long_is_a_lost_lease() -> None:
    async with LookupBuffer("1MiB", max_hold_s=0.01, drain_s=0) as local:
        await insert(local)
        async with serve("mem://", lookup=local) as server:
            link = await dial(server.url, identity=name_of("consumer"))
            hearer = Hearer()
            stream = link.open_stream(hearer, Select(has_key=False, stream=True))
            offer, _ = await hearer.next()
            assert isinstance(offer, Offer)
            stream.send(Reached(offer.token))
            last, _ = await hearer.next()
            assert isinstance(last, Failure) and last.code == "LeaseLost"
            await link.aclose()


async def test_a_late_exit_after_a_lapse_is_a_lost_lease() -> None:
    async with (
        LookupBuffer("1MiB", max_hold_s=0.01, drain_s=0) as local,
        serve("mem://", lookup=local) as server,
        connect(server.url) as peer,
    ):
        await insert(local)
        with pytest.raises(LeaseLost):
            async with peer.lookup.drop_select([1]):
                await until(lambda: local.statistics().lapsed == 1)
        assert local.statistics().entries == 1


@pytest.mark.parametrize("body", [b"", b"seven b"])
def test_a_key_that_is_no_list_of_tokens_breaks_the_link(body: bytes) -> None:
    with pytest.raises(RemoteProtocolError, match="no list of tokens"):
        query_of(Select(has_key=True), body)


async def test_what_was_not_offered_yet_is_retracted_without_a_word(
    local: LookupBuffer, link: Link
) -> None:
    hearer = Hearer()
    link.open_stream(hearer, ANY)
    await until(lambda: local.statistics().waiting_selects == 1)
    entry = local.ledger.table.admit(draft_of("it"))
    local.ledger.give_room(entry)
    assert local.statistics().leased == 1
    local.ledger.forsake(entry)
    assert local.statistics().waiting_selects == 1
    await insert(local)
    assert isinstance((await hearer.next())[0], Offer)


async def test_a_closed_buffer_is_the_answer(local: LookupBuffer, link: Link) -> None:
    hearer = Hearer()
    link.open_stream(hearer, ANY)
    await until(lambda: local.statistics().waiting_selects == 1)
    local.abort()
    last, _ = await hearer.next()
    assert isinstance(last, Failure) and last.code == "BufferClosed"


async def test_a_grant_of_what_has_ended_is_ignored(
    local: LookupBuffer, link: Link
) -> None:
    hearer = Hearer()
    stream = link.open_stream(hearer, ANY)
    await local.insert([1], None, torch.ones(10), None, None)
    offer, _ = await hearer.next()
    assert isinstance(offer, Offer)
    stream.send(Nack(offer.token))
    await until(lambda: not local.statistics().leased)
    assert await local.withdraw(offer.entry_id)
    hearer = Hearer()
    stream = link.open_stream(hearer, ANY)
    stream.send(Grant(offer.transfer))
    stream.send(Reached(b"token"))
    stream.send(Cancel())
    assert await hearer.next() == (Cancelled(), b"")
    assert link.is_open


async def test_a_grant_of_what_was_never_offered_breaks_the_link(link: Link) -> None:
    link.open_stream(Hearer(), ANY).send(Grant(1))
    await until(lambda: not link.is_open)
    assert "never offered" in str(link.error)


async def test_a_word_that_belongs_to_no_query_breaks_the_link(link: Link) -> None:
    link.open_stream(Hearer(), ANY).send(Commit())
    await until(lambda: not link.is_open)
    assert "no Commit belongs here" in str(link.error)


async def test_a_delivery_waits_while_much_is_unwritten(
    local: LookupBuffer, link: Link, monkeypatch: pytest.MonkeyPatch
) -> None:
    await insert(local)
    monkeypatch.setattr(select, "_BUSY_BYTES", -1)
    hearer, given_up = Hearer(), Hearer()
    link.open_stream(given_up, ANY).send(Cancel())
    assert await given_up.next() == (Cancelled(), b"")
    link.open_stream(hearer, ANY)
    await until(lambda: local.statistics().leased == 1)
    assert hearer.frames == []
    monkeypatch.undo()
    assert isinstance((await hearer.next())[0], Offer)


async def test_what_is_cancelled_before_it_is_refused_is_cancelled(
    peers: Peers, local: LookupBuffer
) -> None:
    await local.insert(range(1000), None, None, None, None)
    for services in peers.server._services:
        services.link.limits = type(services.link.limits)(max_body_bytes=1000)
    hearer, link = Hearer(), await peers.consumer.link()
    link.open_stream(hearer, ANY).send(Cancel())
    assert await hearer.next() == (Cancelled(), b"")
    assert local.statistics().entries == 1
