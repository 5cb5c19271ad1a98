"""Deliveries to a peer that says what it likes, also when frames cross on a link."""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

import pytest
import torch

from asynckv import LookupBuffer, TensorSpec, serve
from asynckv.buffers.entries.entries import Lease, StoredEntry, Waiter
from asynckv.buffers.serving import select
from asynckv.buffers.serving.select import (
    SentOffer,
    ServedSelect,
    make_offer,
    may_begin,
)
from asynckv.errors import EntryTooLarge, RemoteProtocolError
from asynckv.links.link import Link, LinkStream
from asynckv.protocol.frames import (
    Accepted,
    Ack,
    Cancel,
    Cancelled,
    Commit,
    Complete,
    Failure,
    Nack,
    Noted,
    Offer,
    Push,
    Reached,
    Retract,
    Select,
    Took,
)
from asynckv.protocol.transfer_frames import Grant, Sent
from asynckv.protocol.values import Limits
from asynckv.protocol.wire import digest_of
from asynckv.tensors.arena import HeapArena
from asynckv.testing import until
from asynckv.testing.lookup_checks.values import cancelled
from asynckv.testing.pairs import Peers
from asynckv.transfers.manifest import unpack
from asynckv.transfers.tokens import Query
from asynckv.waits.waiting import OwnTasks
from harness.ledgers import RecordingHolder, draft_of
from harness.link_pairs import Hearer, dialled, linked
from harness.raw_inserts import NoRoutes, RawInsert, RawMapper

MIB = 2**20

ANY = Select(has_key=False)


async def selected(link: Link) -> tuple[Hearer, LinkStream, Offer]:
    hearer = Hearer()
    stream = link.open_stream(hearer, ANY)
    frame, _ = await hearer.next_of(Offer)
    return hearer, stream, frame


def insert(local: LookupBuffer, nbytes: int = 10, **options: Any) -> Any:
    return local.insert([1], None, torch.ones(nbytes), None, None, **options)


@pytest.mark.parametrize(
    ("stale", "answers"),
    [(Ack(b"stale"), [Failure]), (Nack(b"stale"), [Cancelled]), (Took(b"stale"), [])],
)
async def test_a_stale_word_gives_back_what_is_in_hand_now(
    local: LookupBuffer, link: Link, stale: Any, answers: list[type]
) -> None:
    await insert(local)
    hearer, stream, _ = await selected(link)
    stream.send(stale)
    await until(lambda: not local.statistics().leased)
    assert local.statistics().entries == 1
    await until(lambda: len(hearer.frames) == 1 + len(answers))
    assert [type(frame) for frame, _ in hearer.frames[1:]] == answers
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


@pytest.mark.parametrize("confirm", [False, True])
async def test_what_was_taken_and_taken_back_costs_no_other_entry(
    local: LookupBuffer, confirm: bool
) -> None:
    await insert(local, entry_id="first")
    await insert(local, entry_id="second")
    async with (
        serve("mem://", lookup=local) as server,
        dialled(server.url, "consumer") as link,
    ):
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
        async with (
            serve("mem://", lookup=local) as server,
            dialled(server.url, "consumer") as link,
        ):
            hearer, stream, offer = await selected(link)
            stream.send(Ack(offer.token, confirm=True))
            assert await hearer.next() == (Noted(), b"")
            waiting = asyncio.create_task(local.drop_select([1]))
            await until(lambda: local.statistics().acknowledged == 1)
            assert local.statistics().entries == local.statistics().lapsed == 0
            await cancelled(waiting)


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
    assert (await hearer.next_of(Offer))[0].transfer != offer.transfer


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
        async with (
            serve("mem://", lookup=local) as server,
            dialled(server.url, "consumer") as link,
        ):
            hearer = Hearer()
            stream = link.open_stream(hearer, Select(has_key=False, stream=True))
            offer, _ = await hearer.next_of(Offer)
            stream.send(Reached(offer.token))
            assert (await hearer.next_of(Failure))[0].code == "LeaseLost"


async def test_what_was_not_offered_yet_is_retracted_without_a_word(
    local: LookupBuffer, link: Link
) -> None:
    hearer = Hearer()
    link.open_stream(hearer, ANY)
    await until(lambda: local.statistics().waiting_selects == 1)
    entry = local.ledger.table.admit(draft_of("it"))
    local.ledger.ask_for_room(entry)
    assert local.statistics().leased == 1
    local.ledger.forsake(entry)
    assert local.statistics().waiting_selects == 1
    await insert(local)
    assert isinstance((await hearer.next())[0], Offer)


async def test_a_grant_of_what_has_ended_is_ignored(
    local: LookupBuffer, link: Link
) -> None:
    hearer = Hearer()
    stream = link.open_stream(hearer, ANY)
    await local.insert([1], None, torch.ones(10), None, None)
    offer, _ = await hearer.next_of(Offer)
    stream.send(Nack(offer.token))
    await until(lambda: not local.statistics().leased)
    assert await local.withdraw(offer.entry_id)
    hearer = Hearer()
    stream = link.open_stream(hearer, ANY)
    stream.send(Grant(offer.transfer))
    stream.send(Cancel())
    assert await hearer.next() == (Cancelled(), b"")
    assert link.is_open


async def test_a_delivery_waits_while_much_is_unwritten(
    local: LookupBuffer, link: Link, monkeypatch: pytest.MonkeyPatch
) -> None:
    await insert(local)
    monkeypatch.setattr(select, "BUSY_BYTES", -1)
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


SMALL, LARGE = 8, 2**20


def leased(nbytes: int, *, complete: bool = True) -> Lease:
    entry = StoredEntry(draft_of("it", (1, 2), nbytes), 1)
    entry.place_regions(HeapArena(2 * LARGE).allocate(entry.draft.layout.sizes) or [])
    entry.regions[0].view()[:] = b"k" * nbytes
    entry.complete = complete
    waiter = Waiter(Query(None), RecordingHolder(), 1, None)
    return Lease(entry, waiter, 2, 3, b"token")


def refuse(error: Exception) -> None:
    raise AssertionError(error)


class Ends(NamedTuple):
    """A stream that offers, and who hears and receives it."""

    stream: LinkStream
    hearer: Hearer
    near: Link

    def receive(self, transfer: int) -> None:
        memory = memoryview(bytearray(LARGE))
        self.near.payload.receive(transfer, 0, memory, lambda digest, error: None)

    def grant(self, offering: SentOffer, transfer: int | None = None) -> None:
        """The peer grants what was offered, or another transfer."""
        grant = Grant(offering.transfer if transfer is None else transfer)
        offering.on_grant(grant, NoRoutes(), refuse, OwnTasks())


@pytest.fixture
async def ends() -> AsyncIterator[Ends]:
    async with linked("mem://", lambda *asked: None) as pair:
        hearer = Hearer()
        pair.near.open_stream(hearer, Select(has_key=False))
        await until(lambda: bool(pair.service.asked))
        yield Ends(pair.service.asked[0][0], hearer, pair.near)


async def test_what_is_small_rides_with_its_offer(ends: Ends) -> None:
    make_offer(ends.stream.link, ends.stream, leased(SMALL))
    offer, body = await ends.hearer.next()
    assert isinstance(offer, Offer) and offer.inline and offer.complete
    assert (offer.token, offer.attempt, offer.matched_tokens) == (b"token", 3, 2)
    assert bytes(unpack(body, inline=True).inline[0]) == b"k" * SMALL


async def test_what_is_large_or_not_whole_does_not(ends: Ends) -> None:
    for lease in (leased(LARGE), leased(SMALL, complete=False)):
        make_offer(ends.stream.link, ends.stream, lease)
        offer, body = await ends.hearer.next()
        assert isinstance(offer, Offer) and not offer.inline
        assert offer.complete is lease.entry.complete
        assert unpack(body, inline=False).inline == []


async def test_an_offer_that_no_frame_can_hold_is_not_sent(ends: Ends) -> None:
    ends.stream.link.limits = Limits(max_body_bytes=20)
    with pytest.raises(EntryTooLarge):
        make_offer(ends.stream.link, ends.stream, leased(SMALL))
    assert not ends.hearer.frames


async def test_parts_follow_the_grant_of_this_very_offer(ends: Ends) -> None:
    lease = leased(LARGE)
    offering = make_offer(ends.stream.link, ends.stream, lease)
    ends.receive(offering.transfer)
    offering.part_landed(0)  # not granted yet
    lease.entry.landed.append(0)
    ends.grant(offering, offering.transfer - 2)  # of what has ended
    assert offering.outgoing is None
    ends.grant(offering)
    with pytest.raises(RemoteProtocolError, match="still leaving"):
        ends.grant(offering)
    await until(lambda: len(ends.hearer.frames) == 2)
    assert isinstance(ends.hearer.frames[1][0], Sent)


async def test_a_part_that_lands_after_the_grant_is_sent(ends: Ends) -> None:
    offering = make_offer(ends.stream.link, ends.stream, leased(LARGE, complete=False))
    ends.receive(offering.transfer)
    ends.grant(offering)
    offering.part_landed(0)
    await until(lambda: len(ends.hearer.frames) == 2)
    assert isinstance(ends.hearer.frames[1][0], Sent)


async def test_what_has_lost_its_memory_is_not_sent(ends: Ends) -> None:
    lease = leased(LARGE, complete=False)
    offering = make_offer(ends.stream.link, ends.stream, lease)
    lease.entry.drop_regions()
    ends.grant(offering)
    offering.part_landed(0)
    offering.stop()
    offering.retract()
    await until(lambda: len(ends.hearer.frames) == 2)
    assert ends.hearer.frames[1][0] == Retract(offering.transfer)


async def test_a_peer_is_told_that_nothing_more_comes(ends: Ends) -> None:
    offering = make_offer(ends.stream.link, ends.stream, leased(LARGE, complete=False))
    offering.completed()
    await until(lambda: len(ends.hearer.frames) == 2)
    assert ends.hearer.frames[1][0] == Complete(offering.transfer)


def test_only_a_writers_own_entry_is_shown_to_a_stream_early() -> None:
    large, small = (leased(nbytes).entry for nbytes in (LARGE, SMALL))
    assert may_begin(large, streams=False)
    assert not may_begin(small, streams=False)
    assert not may_begin(large, streams=True)
    written = StoredEntry(draft_of("it", streaming=True), 1)
    assert may_begin(written, streams=True)


async def test_a_part_that_broke_with_its_link_is_not_said_to_be_sent(
    ends: Ends,
) -> None:
    offering = make_offer(ends.stream.link, ends.stream, leased(LARGE, complete=False))
    ends.receive(offering.transfer)
    ends.grant(offering)
    offering.part_landed(0)
    ends.stream.link.abort()
    await ends.stream.link.payload.aclose()
    assert not any(isinstance(frame, Sent) for frame, _ in ends.hearer.frames)


async def test_a_grant_of_a_retracted_offer_leaves_the_mapped_one_after_it_alone(
    local: LookupBuffer, mapper: RawMapper
) -> None:
    await mapper.map()
    room = local.statistics().max_bytes
    filler = await local.insert([9], None, torch.empty(room - 64).byte(), None, None)
    hearer, key = Hearer(), struct.pack("<q", 1)
    stream = mapper.link.open_stream(hearer, Select(has_key=True), key)
    with pytest.raises(LookupError):
        async with local.open_insert([1], None, {"key": TensorSpec((MIB,), "uint8")}):
            first, _ = await hearer.next()
            raise LookupError
    assert isinstance(first, Offer) and first.mapped is None
    assert await hearer.next() == (Retract(first.transfer), b"")
    await local.withdraw(filler)
    await local.insert([1], None, torch.ones(MIB), None, None)
    second, _ = await hearer.next()
    assert isinstance(second, Offer) and second.mapped is not None
    stream.send(Grant(first.transfer))
    stream.send(Took(second.token))
    await until(lambda: local.statistics().acknowledged == 1)
    assert mapper.link.is_open


async def test_a_tensor_that_is_not_needed_any_more_may_be_pushed_again(
    local: LookupBuffer, link: Link
) -> None:
    raw = RawInsert(link, MIB, MIB, streaming=True)
    await raw.granted()
    async with local.open_drop_select() as stream:
        first = await raw.push(0)
        data = memoryview(bytes(MIB))
        link.payload.send(first, 0, data, lambda *_: None)
        raw.stream.send(Sent(first, 0, digest_of(data)))
        await stream.wait_for("0.key")
    for _ in range(2):
        raw.stream.send(Push(again := link.new_transfer(), 1, inline=False))
        while (await raw.hearer.next())[0] != Retract(again):
            pass
    raw.stream.send(Commit())
    assert await raw.last() == Accepted()


async def lose(local: LookupBuffer, entry_id: str) -> None:
    """Let an entry fail in another consumer as often as it may."""
    for _ in range(2):
        with contextlib.suppress(LookupError):
            async with local.drop_select(entry_id=entry_id):
                raise LookupError


@pytest.mark.parametrize("frame", [Took, Reached])
async def test_what_is_offered_as_the_peer_has_ended_is_anothers(
    local: LookupBuffer, mapper: RawMapper, frame: type[Took | Reached]
) -> None:
    await mapper.map()
    small = await local.insert([1], None, torch.ones(8), None, None, deliveries=2)
    hearer, stream, first, _ = await mapper.select()
    large = await local.insert([1], None, torch.ones(MIB), None, None)
    await lose(local, small)
    assert await hearer.next() == (Retract(first.transfer), b"")
    assert (await hearer.next_of(Offer))[0].mapped is not None
    stream.send(frame(first.token))
    entry = await asyncio.wait_for(local.drop_select(entry_id=large), 10)
    assert entry.entry_id == large
    if frame is Took:
        await until(lambda: not local.statistics().mapped_by)
    else:
        assert isinstance((await hearer.next())[0], Failure)
