from __future__ import annotations

from collections.abc import AsyncIterator
from typing import NamedTuple

import pytest

from asynckv.buffers.entries.entries import Lease, StoredEntry, Waiter
from asynckv.buffers.serving.select import Offering, make_offer, may_begin
from asynckv.errors import EntryTooLarge, RemoteProtocolError
from asynckv.links.link import Link, LinkStream
from asynckv.protocol.frames import (
    Complete,
    Offer,
    Retract,
    Select,
)
from asynckv.protocol.transfer_frames import Grant, Sent
from asynckv.protocol.values import Limits
from asynckv.tensors.arena import HeapArena
from asynckv.testing.blocked import until
from asynckv.transfers.manifest import unpack
from asynckv.transfers.queries import Query
from asynckv.waits.own_tasks import OwnTasks
from harness.holders import RecordingHolder, draft_of
from harness.link_pairs import Hearer, linked
from harness.no_routes import NoRoutes

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

    def grant(self, offering: Offering, transfer: int | None = None) -> None:
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
    stream, hearer, _ = ends
    make_offer(stream.link, stream, leased(SMALL))
    offer, body = await hearer.next()
    assert isinstance(offer, Offer) and offer.inline and offer.complete
    assert (offer.token, offer.attempt, offer.matched_tokens) == (b"token", 3, 2)
    assert bytes(unpack(body, inline=True).inline[0]) == b"k" * SMALL


async def test_what_is_large_or_not_whole_does_not(ends: Ends) -> None:
    stream, hearer, _ = ends
    for lease in (leased(LARGE), leased(SMALL, complete=False)):
        make_offer(stream.link, stream, lease)
        offer, body = await hearer.next()
        assert isinstance(offer, Offer) and not offer.inline
        assert offer.complete is lease.entry.complete
        assert unpack(body, inline=False).inline == []


async def test_an_offer_that_no_frame_can_hold_is_not_sent(ends: Ends) -> None:
    stream, hearer, _ = ends
    stream.link.limits = Limits(max_body_bytes=20)
    with pytest.raises(EntryTooLarge):
        make_offer(stream.link, stream, leased(SMALL))
    assert not hearer.frames


async def test_parts_follow_the_grant_of_this_very_offer(ends: Ends) -> None:
    stream, hearer, _ = ends
    lease = leased(LARGE)
    offering = make_offer(stream.link, stream, lease)
    ends.receive(offering.transfer)
    offering.part_landed(0)  # not granted yet
    lease.entry.landed.append(0)
    ends.grant(offering, offering.transfer - 2)  # of what has ended
    assert offering.outgoing is None
    ends.grant(offering)
    with pytest.raises(RemoteProtocolError, match="still leaving"):
        ends.grant(offering)
    await until(lambda: len(hearer.frames) == 2)
    assert isinstance(hearer.frames[1][0], Sent)


async def test_a_grant_of_what_was_never_offered_makes_no_sense(ends: Ends) -> None:
    offering = make_offer(ends.stream.link, ends.stream, leased(LARGE))
    with pytest.raises(RemoteProtocolError, match="never offered"):
        ends.grant(offering, offering.transfer + 2)


async def test_a_part_that_lands_after_the_grant_is_sent(ends: Ends) -> None:
    stream, hearer, _ = ends
    offering = make_offer(stream.link, stream, leased(LARGE, complete=False))
    ends.receive(offering.transfer)
    ends.grant(offering)
    offering.part_landed(0)
    await until(lambda: len(hearer.frames) == 2)
    assert isinstance(hearer.frames[1][0], Sent)


async def test_what_has_lost_its_memory_is_not_sent(ends: Ends) -> None:
    stream, hearer, _ = ends
    lease = leased(LARGE, complete=False)
    offering = make_offer(stream.link, stream, lease)
    lease.entry.drop_regions()
    ends.grant(offering)
    offering.part_landed(0)
    offering.stop()
    offering.retract()
    await until(lambda: len(hearer.frames) == 2)
    assert hearer.frames[1][0] == Retract(offering.transfer)


async def test_a_peer_is_told_that_nothing_more_comes(ends: Ends) -> None:
    stream, hearer, _ = ends
    offering = make_offer(stream.link, stream, leased(LARGE, complete=False))
    offering.completed()
    await until(lambda: len(hearer.frames) == 2)
    assert hearer.frames[1][0] == Complete(offering.transfer)


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
    stream, hearer, _ = ends
    offering = make_offer(stream.link, stream, leased(LARGE, complete=False))
    ends.receive(offering.transfer)
    ends.grant(offering)
    offering.part_landed(0)
    stream.link.abort()
    await stream.link.payload.aclose()
    assert not any(isinstance(frame, Sent) for frame, _ in hearer.frames)
