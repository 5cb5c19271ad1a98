"""Entries that a peer delivers, offer by offer; and over links that are cut."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping

import pytest
import torch

from asynckv import (
    ChecksumError,
    EntryTooLarge,
    LeaseLost,
    LookupBuffer,
    Peer,
    PeerLost,
    Server,
    TensorSpec,
    connect,
    serve,
)
from asynckv.buffers.remote.select import RemoteSelect
from asynckv.links.link import Link, LinkStream
from asynckv.protocol.codec import Buffer
from asynckv.protocol.frames import (
    Accepted,
    Ack,
    Cancel,
    Cancelled,
    Complete,
    Failure,
    Frame,
    Noted,
    Offer,
    OpeningFrame,
    Reached,
    Retract,
    Took,
)
from asynckv.protocol.transfer_frames import Eager, Grant, Sent
from asynckv.protocol.wire import digest_of
from asynckv.tensors.views import spec_of
from asynckv.testing import until, until_blocked
from asynckv.testing.lookup_checks.values import cancelled, started
from asynckv.testing.pairs import Peers
from asynckv.transfers.delivery import Delivery, ReceiveBudget
from asynckv.transfers.tokens import make_query
from harness.buffer_fixtures import CutWhen
from harness.fake_devices import FakeDevice
from harness.link_pairs import LinkPair, linked
from harness.raw_inserts import NoRoutes, body_with

MIB = 2**20


def selecting_on(pair: LinkPair, budget: ReceiveBudget) -> RemoteSelect:
    return RemoteSelect(pair.near, make_query([1], None), {}, NoRoutes(budget=budget))


async def begun(
    pair: LinkPair,
    budget: ReceiveBudget,
    into: Mapping[str, torch.Tensor] | None = None,
    *,
    streams: bool = False,
) -> tuple[RemoteSelect, asyncio.Task[Delivery], LinkStream]:
    """Ask for a delivery, and return also the stream on which the peer heard of it."""
    query = make_query([1], None)
    selecting = RemoteSelect(
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
) -> tuple[RemoteSelect, Delivery]:
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
        await cancelled(delivered)
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
    await cancelled(delivered)


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


@pytest.mark.parametrize("end", [Peer.abort, Peer.aclose])
async def test_who_waits_for_the_receive_bound_learns_that_the_peer_is_lost(
    local: LookupBuffer, end: Callable[[Peer], Awaitable[None] | None]
) -> None:
    for _ in range(2):
        await local.insert([1], None, ONES, None, None)
    async with (
        serve("mem://", lookup=local) as server,
        connect(server.url, max_bytes="1MiB") as peer,
    ):
        with pytest.raises(LeaseLost):
            async with peer.lookup.open_drop_select([1]) as stream:
                await stream.wait_for("key")
                waiting = await started(peer.lookup.drop_select([1]))
                if (ending := end(peer)) is not None:
                    await ending
                with pytest.raises(PeerLost):
                    await asyncio.wait_for(waiting, 10)


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
        await cancelled(delivered)
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


async def left_early(pair: LinkPair) -> tuple[RemoteSelect, Delivery, LinkStream]:
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


FarLink = Callable[[Server, Peer], Link]


@pytest.mark.parametrize(("kind", "nbytes"), [(Took, 10), (Ack, MIB), (Reached, MIB)])
async def test_a_link_cut_around_the_acknowledgement_takes_the_entry_once(
    peers: Peers, local: LookupBuffer, cut_when: CutWhen, kind: type, nbytes: int
) -> None:
    await local.insert([1], None, torch.ones(nbytes), None, None)
    link = await peers.consumer.link()
    cut_when(link, kind)
    entry = await peers.consumer.lookup.drop_select([1])
    assert torch.equal(entry.key_tensor, torch.ones(nbytes))
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


async def test_an_acceptance_lost_with_the_link_is_asked_for_on_the_next(
    peers: Peers, local: LookupBuffer, far_link: FarLink, cut_when: CutWhen
) -> None:
    await local.insert([1], None, torch.ones(10), None, None)
    cut_when(far_link(peers.server, peers.consumer), Accepted)
    async with peers.consumer.lookup.drop_select([1]):
        pass
    assert local.statistics().entries == 0


async def test_an_acceptance_that_nobody_can_tell_of_is_a_lost_lease(
    peers: Peers, local: LookupBuffer, far_link: FarLink, cut_when: CutWhen
) -> None:
    await local.insert([1], None, torch.ones(10), None, None)
    cut_when(far_link(peers.server, peers.consumer), Accepted)
    with pytest.raises(LeaseLost):
        async with peers.consumer.lookup.drop_select([1]):
            peers.consumer.reconnect_s = 0


@pytest.fixture
async def noted(
    local: LookupBuffer, monkeypatch: pytest.MonkeyPatch
) -> list[LinkStream]:
    """The stream on which the server does not send its first Noted."""
    await local.insert([1], None, torch.ones(MIB), None, None)
    send, kept = LinkStream.send, list[LinkStream]()

    def send_or_keep(stream: LinkStream, frame: Frame, body: Buffer = b"") -> None:
        if isinstance(frame, Noted) and not kept:
            kept.append(stream)
        else:
            send(stream, frame, body)

    monkeypatch.setattr(LinkStream, "send", send_or_keep)
    return kept


@pytest.mark.parametrize("way", ["leaves", "cancels"])
async def test_an_acknowledgement_that_is_broken_off_gives_the_entry_back(
    peers: Peers, local: LookupBuffer, noted: list[LinkStream], way: str
) -> None:
    call = asyncio.ensure_future(peers.consumer.lookup.drop_select([1]))
    await until(lambda: bool(noted))
    if way == "leaves":
        await peers.consumer.aclose()
    else:
        call.cancel()
    await asyncio.wait({call})
    assert call.cancelled() or isinstance(call.exception(), PeerLost)
    await until(lambda: not local.statistics().leased)
    assert local.statistics().entries == 1


async def test_an_acknowledgement_that_comes_too_late_selects_again(
    peers: Peers, local: LookupBuffer, noted: list[LinkStream]
) -> None:
    call = asyncio.ensure_future(peers.consumer.lookup.drop_select([1]))
    await until(lambda: bool(noted))
    noted[0].send(Failure("LeaseLost", "taken back"))
    await local.insert([1], None, torch.ones(MIB), None, None, entry_id="other")
    assert (await call).entry_id == "other"
    assert peers.consumer.budget.used_bytes == 0


SPECS = {"0.key": TensorSpec((MIB,), "uint8"), "1.key": TensorSpec((MIB,), "uint8")}

ONES = torch.ones(MIB, dtype=torch.uint8)


async def test_an_entry_whose_writer_fails_before_anything_came_is_not_shown(
    peers: Peers, local: LookupBuffer
) -> None:
    async def read() -> str:
        async with peers.consumer.lookup.open_drop_select([1]) as stream:
            return stream.entry_id

    reading = asyncio.create_task(read())
    await until(lambda: local.statistics().waiting_selects == 1)
    with pytest.raises(LookupError):
        async with local.open_insert([1], None, SPECS):
            raise LookupError
    await until(lambda: local.statistics().waiting_selects == 1)
    await local.insert([1], None, None, None, None, entry_id="next")
    assert await reading == "next"


async def test_leaving_early_stops_what_is_on_its_way_and_frees_the_budget(
    peers: Peers, local: LookupBuffer
) -> None:
    async with local.open_insert([1], None, SPECS) as writer:
        await writer.put("1.key", ONES)
        into = {"0.key": torch.zeros(MIB, dtype=torch.uint8)}
        async with peers.consumer.lookup.open_drop_select([1], into=into) as stream:
            assert torch.equal(await stream.wait_for("1.key"), ONES)
            assert peers.consumer.budget.used_bytes == MIB
        assert peers.consumer.budget.used_bytes == 0
        payload = (await peers.consumer.link()).payload
        assert not payload._table.is_waiting  # type: ignore[attr-defined]
        await writer.put("0.key", ONES)
    assert not into["0.key"].any() and local.statistics().entries == 0


async def test_a_stream_that_was_left_gives_nothing_more(
    peers: Peers, local: LookupBuffer
) -> None:
    await local.insert([1], None, torch.ones(3), None, None)
    async with peers.consumer.lookup.open_drop_select([1]) as stream:
        await stream.wait_for("key")
    with pytest.raises(RuntimeError, match="left already"):
        await stream.wait_for("key")


async def test_leaving_a_stream_wakes_who_still_waits_for_a_tensor(
    peers: Peers, local: LookupBuffer
) -> None:
    async with local.open_insert([1], None, {"key": SPECS["0.key"]}) as writer:
        async with peers.consumer.lookup.open_drop_select([1]) as stream:
            waiting = await started(stream.wait_for("key"))
        with pytest.raises(RuntimeError, match="over"):
            await asyncio.wait_for(waiting, 10)
        await writer.put("key", ONES)


async def test_a_read_that_is_cancelled_on_the_way_to_a_gpu_is_made_again(
    on_gpu: tuple[FakeDevice, Peer], local: LookupBuffer
) -> None:
    _, peer = on_gpu
    await local.insert([1], None, torch.ones(8), torch.zeros(8), None)
    async with peer.lookup.open_drop_select([1]) as stream:
        reading = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        reading.cancel()
        await asyncio.wait({reading})
        assert reading.cancelled()
        assert [name async for name, _ in stream] == ["key", "value"]


async def test_the_iteration_ends_with_the_commit(
    peers: Peers, local: LookupBuffer
) -> None:
    writing = local.open_insert([1], None, {"key": SPECS["0.key"]})
    writer = await writing.__aenter__()
    await writer.put("key", ONES)
    async with peers.consumer.lookup.open_drop_select([1]) as stream:
        await anext(stream)
        end = await started(anext(stream, None))
        assert not end.done()
        await writing.__aexit__(None, None, None)
        assert await end is None
