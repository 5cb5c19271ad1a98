"""Values for a peer that says what it likes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence

import pytest
import torch

from asynckv import BufferClosed, Server, StoreBuffer, TensorSpec, connect, serve
from asynckv.buffers.lower_tiers import Owner
from asynckv.links.link import Link, LinkStream
from asynckv.protocol.frames import (
    Accepted,
    Cancel,
    Cancelled,
    Delete,
    Failure,
    Get,
    Offer,
    OpeningFrame,
    Peek,
    Pin,
    Pinned,
    Put,
    Result,
    Took,
)
from asynckv.protocol.transfer_frames import Grant, Sent
from asynckv.protocol.wire import digest_of
from asynckv.tensors import views
from asynckv.testing import until
from asynckv.testing.expectations import only
from asynckv.testing.lookup_checks.values import MIB, started
from asynckv.waits.waiting import wait_shielded
from harness.ledgers import RecordingTiers
from harness.link_pairs import Hearer, dialled

SPEC = TensorSpec((MIB,), "uint8")
"""Of the value that is stored as ``key``."""


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
    async with dialled(server.url) as link:
        yield link


@pytest.fixture
def far_link(server: Server, link: Link) -> Link:
    (services,) = server._services
    return services.link


async def begin_put(link: Link) -> tuple[LinkStream, Hearer, int]:
    """Replace what is stored as ``key``: room was found, the bytes may come."""
    hearer, transfer = Hearer(), link.new_transfer()
    stream = link.open_stream(hearer, Put("key", transfer, inline=False, spec=SPEC))
    assert await hearer.next() == (Grant(transfer), b"")
    return stream, hearer, transfer


async def begin_get(link: Link) -> tuple[LinkStream, Hearer, Offer]:
    """Ask for what is stored as ``key``, which is offered."""
    stream = link.open_stream(hearer := Hearer(), Get("key"))
    offer, _ = await hearer.next_of(Offer)
    return stream, hearer, offer


async def answer_to(link: Link, frame: OpeningFrame) -> Result:
    """Return what a question is answered at once."""
    hearer = Hearer()
    link.open_stream(hearer, frame)
    last, _ = await hearer.next_of(Result)
    return last


async def test_bytes_that_changed_on_their_way_are_not_stored(
    store: StoreBuffer, link: Link
) -> None:
    stream, hearer, transfer = await begin_put(link)
    link.payload.send(transfer, 0, memoryview(bytes(MIB)), lambda *_: None)
    stream.send(Sent(transfer, 0, b"of other bytes.."))
    assert (await hearer.next_of(Failure))[0].code == "ChecksumError"
    assert bool(only(await store.get("key")).all())


async def test_inline_bytes_that_changed_are_not_stored(link: Link) -> None:
    hearer = Hearer()
    put = Put("new", 1, inline=True, spec=TensorSpec((3,), "uint8"), digest=b"wrong")
    link.open_stream(hearer, put, b"abc")
    assert (await hearer.next_of(Failure))[0].code == "ChecksumError"


async def test_more_than_may_ride_along_is_asked_for_by_payload(
    store: StoreBuffer, link: Link
) -> None:
    hearer, transfer = Hearer(), link.new_transfer()
    put = Put("new", transfer, inline=True, spec=TensorSpec((MIB,), "uint8"))
    stream = link.open_stream(hearer, put, bytes(MIB))
    assert (await hearer.next())[0] == Grant(transfer)
    link.payload.send(transfer, 0, memoryview(b"x" * MIB), lambda *_: None)
    stream.send(Sent(transfer, 0, digest_of(b"x" * MIB)))
    assert (await hearer.next())[0] == Accepted()
    assert bool((only(await store.get("new")) == ord("x")).all())


async def test_a_value_that_is_read_outlives_its_key(
    store: StoreBuffer, server: Server, link: Link
) -> None:
    stream, hearer, offer = await begin_get(link)
    await store.delete("key")
    await store.put("other", torch.zeros(MIB, dtype=torch.uint8))
    target, landed = memoryview(bytearray(MIB)), []
    link.payload.receive(
        offer.transfer, 0, target, lambda digest, error: landed.append(digest)
    )
    stream.send(Grant(offer.transfer))
    done, _ = await hearer.next()
    await until(lambda: bool(landed))
    assert isinstance(done, Sent) and [done.digest] == landed
    assert target[0] == target[-1] == 1
    stream.send(Took(b""))
    (services,) = server._services
    served = services.store
    await until(lambda: served is not None and not served.under_way)


@pytest.mark.parametrize("lost", [True, False])
async def test_a_get_that_is_given_up_unpins(
    store: StoreBuffer, server: Server, link: Link, *, lost: bool
) -> None:
    stream, hearer, _ = await begin_get(link)
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
    stream, *_ = await begin_get(link)
    leaving = await started(server.aclose())
    refused = Hearer()
    link.open_stream(refused, Delete("key"))
    assert (await refused.next_of(Failure))[0].code == "BufferClosed"
    assert not leaving.done()
    stream.send(Cancel())
    await leaving


async def test_a_store_alone_answers_no_question_about_entries(link: Link) -> None:
    hearer = Hearer()
    link.open_stream(hearer, Peek(has_key=False))
    last, _ = await hearer.next_of(Failure)
    assert "serves a store, no lookup buffer" in last.message


@pytest.mark.parametrize("gone", [Delete("key"), Put("key", 1, inline=True)])
async def test_a_value_is_deleted_by_name_or_by_putting_nothing(
    store: StoreBuffer, link: Link, gone: OpeningFrame
) -> None:
    assert await answer_to(link, gone) == Result(1)
    assert await store.contains(["key"]) == (False,)
    assert await answer_to(link, gone) == Result(0)


async def test_what_is_not_stored_is_said_not_to_be_there(link: Link) -> None:
    assert await answer_to(link, Get("other")) == Result(0)


async def test_a_small_value_rides_with_its_offer(
    store: StoreBuffer, server: Server, link: Link
) -> None:
    await store.put("small", torch.tensor([7, 8, 9], dtype=torch.uint8))
    hearer = Hearer()
    link.open_stream(hearer, Get("small"))
    offer, body = await hearer.next()
    assert isinstance(offer, Offer) and offer.inline and body.endswith(b"\7\10\11")
    assert await hearer.next() == (Result(1), b"")
    (services,) = server._services
    assert services.store is not None and not services.store.under_way


async def test_a_put_of_a_dtype_that_an_older_torch_does_not_have_breaks_the_link(
    link: Link, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(views._DTYPES, "uint16")
    put = Put("new", 1, inline=False, spec=TensorSpec((MIB,), "uint16"))
    link.open_stream(Hearer(), put)
    await until(lambda: not link.is_open)
    assert "'uint16' cannot be sent by this version of torch" in str(link.error)


async def test_a_put_that_is_given_up_when_its_bytes_are_in_stores_nothing(
    store: StoreBuffer, link: Link
) -> None:
    stream, hearer, transfer = await begin_put(link)
    sent: list[bytes] = []
    data = memoryview(bytes(MIB))
    link.payload.send(transfer, 0, data, lambda digest, error: sent.append(digest))
    await until(lambda: bool(sent))
    stream.send(Cancel())
    stream.send(Sent(transfer, 0, sent[0]))  # handled in the same tick as the Cancel
    assert await hearer.next() == (Cancelled(), b"")
    assert bool(only(await store.get("key")).all())
    assert store.statistics().used_bytes == MIB


async def test_a_value_that_is_granted_again_is_sent_again(link: Link) -> None:
    stream, hearer, offer = await begin_get(link)
    for _ in range(2):
        target = memoryview(bytearray(MIB))
        link.payload.receive(offer.transfer, 0, target, lambda *_: None)
        stream.send(Grant(offer.transfer))
        assert (await hearer.next_of(Sent))[0].digest == digest_of(target)


async def test_a_get_that_is_given_up_while_it_is_sent_unpins_and_ends(
    store: StoreBuffer, link: Link
) -> None:
    stream, hearer, offer = await begin_get(link)
    link.payload.announce(offer.transfer)
    stream.send(Grant(offer.transfer))
    stream.send(Cancel())
    last, _ = await hearer.next()
    if isinstance(last, Sent):  # all of it may have come before the Cancel
        last, _ = await hearer.next()
    assert last == Cancelled()
    await store.put("other", torch.zeros(8 * MIB, dtype=torch.uint8))
    assert await answer_to(link, Get("key")) == Result(0)
    assert hearer.frames[-1] == (Cancelled(), b"")
    link.payload.stop(offer.transfer)


async def test_a_value_is_offered_when_the_peer_has_read_what_came_before(
    far_link: Link, link: Link, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting: list[Callable[[], None]] = []
    monkeypatch.setattr(type(far_link), "outgoing_bytes", 5 * MIB)
    monkeypatch.setattr(far_link, "call_when_drained", waiting.append)
    hearer = Hearer()
    link.open_stream(hearer, Get("key"))
    await until(lambda: bool(waiting))
    assert not hearer.frames
    monkeypatch.undo()
    waiting[0]()
    assert isinstance((await hearer.next())[0], Offer)


async def test_a_value_is_not_offered_to_who_left_before_it_could_be(
    far_link: Link, link: Link, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting: list[Callable[[], None]] = []
    monkeypatch.setattr(type(far_link), "outgoing_bytes", 5 * MIB)
    monkeypatch.setattr(far_link, "call_when_drained", waiting.append)
    hearer = Hearer()
    link.open_stream(hearer, Get("key")).send(Cancel())
    assert await hearer.next() == (Cancelled(), b"")
    monkeypatch.undo()
    waiting[0]()
    assert await answer_to(link, Get("other")) == Result(0)
    assert len(hearer.frames) == 1


async def test_bytes_that_a_lane_could_not_send_are_not_said_to_be_sent(
    far_link: Link, link: Link, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream, hearer, offer = await begin_get(link)
    monkeypatch.setattr(
        far_link.payload, "send", lambda *a, **_: a[-1](b"", OSError("full"))
    )
    stream.send(Grant(offer.transfer))
    stream.send(Cancel())
    assert await hearer.next() == (Cancelled(), b"")


async def test_aborting_the_server_ends_a_put_under_way(
    store: StoreBuffer, server: Server, link: Link
) -> None:
    _, hearer, _ = await begin_put(link)
    server.abort()
    assert not (await hearer.loss()).goodbye
    await until(lambda: store.statistics().used_bytes == MIB)


async def test_leaving_in_a_hurry_waits_for_threads_that_touch_the_memory_of_a_put(
    store: StoreBuffer,
    server: Server,
    far_link: Link,
    link: Link,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    quiet = asyncio.get_running_loop().create_future()
    await begin_put(link)
    monkeypatch.setattr(far_link.payload, "quiesce", lambda _: wait_shielded(quiet))
    link.abort()
    await until(lambda: not far_link.is_open)
    leaving = await started(server._close(drain_s=0))
    assert not leaving.done() and store.statistics().used_bytes == 2 * MIB
    quiet.set_result(None)
    await leaving
    assert store.statistics().used_bytes == MIB


@pytest.mark.usefixtures("no_slabs")
async def test_a_put_for_which_there_is_no_memory_is_refused_alone() -> None:
    async with (
        StoreBuffer(2**49) as store,
        serve("mem://", store=store) as server,
        dialled(server.url, "peer") as link,
    ):
        for nbytes in (2**48, 0):
            hearer, spec = Hearer(), TensorSpec((nbytes,), "uint8")
            put = Put("key", link.new_transfer(), inline=not nbytes, spec=spec)
            link.open_stream(hearer, put)
            last, _ = await hearer.next()
            assert getattr(last, "code", "") == ("EntryTooLarge" if nbytes else "")
        assert link.is_open and not store.statistics().used_bytes


async def test_a_hold_costs_its_server_something_until_it_ends() -> None:
    async with StoreBuffer("8MiB") as local, serve("mem://pins", store=local) as server:
        await local.put("a", torch.ones(9))
        async with connect("mem://pins") as peer:
            async with peer.store.pin(["a", "b"]):
                assert server.waiting_bytes > 0
            await until(lambda: not server.waiting_bytes)


async def test_whoever_says_what_does_not_belong_there_holds_nothing_any_more() -> None:
    async with StoreBuffer("8MiB") as local, serve("mem://pins", store=local) as server:
        await local.put("a", torch.ones(9))
        async with dialled(server.url) as link:
            stream = link.open_stream(hearer := Hearer(), Pin(("a",)))
            assert await hearer.next() == (Pinned((True,)), b"")
            assert local.values._values[None]["a"].readers == 1
            stream.send(Grant(1))
            assert "no Grant belongs here" in str((await hearer.loss()).__cause__)
            await until(lambda: not local.values._values[None]["a"].readers)
            assert not server.waiting_bytes


async def test_a_closed_store_charges_nobody_for_what_it_refuses() -> None:
    async with StoreBuffer("8MiB") as local, serve("mem://pins", store=local) as server:
        async with connect("mem://pins") as peer:
            await local.aclose()
            with pytest.raises(BufferClosed):
                async with peer.store.pin(["a"]):
                    raise AssertionError
            with pytest.raises(BufferClosed):
                await peer.store.get("a")
            assert not server.waiting_bytes


class SilentTiers(RecordingTiers):
    """There may be something, and it never comes."""

    async def fetch(self, keys: Sequence[str], owner: Owner) -> None:
        self.told += [("fetched", (key, owner)) for key in keys]
        await asyncio.get_running_loop().create_future()


async def test_who_waits_for_what_is_far_may_say_no_more_than_that_it_goes(
    store: StoreBuffer, link: Link
) -> None:
    store.values.lower = lower = SilentTiers()
    stream = link.open_stream(hearer := Hearer(), Get("far"))
    await until(lambda: ("fetched", ("far", None)) in lower.told)
    stream.send(Grant(1))
    assert "no Grant belongs here" in str((await hearer.loss()).__cause__)


async def test_what_is_far_is_fetched_no_further_for_a_link_that_is_lost(
    store: StoreBuffer, server: Server, link: Link
) -> None:
    store.values.lower = lower = SilentTiers()
    link.open_stream(Hearer(), Get("far"))
    await until(lambda: ("fetched", ("far", None)) in lower.told)
    assert server.waiting_bytes
    link.abort()
    await until(lambda: not server.waiting_bytes)


async def test_a_put_that_waits_for_room_ends_with_its_link(
    store: StoreBuffer, link: Link
) -> None:
    spec = TensorSpec((8 * MIB,), "uint8")
    async with store.pin(["key"]):
        put = Put("new", link.new_transfer(), inline=False, spec=spec)
        link.open_stream(Hearer(), put)
        await until(lambda: store.statistics().waiting_puts == 1)
        link.abort()
        await until(lambda: not store.statistics().waiting_puts)
