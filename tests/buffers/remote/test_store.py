"""A peer's store: values that are put, got and pinned there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest
import torch

from asynckv import (
    ChecksumError,
    EntryTooLarge,
    KVStoreBuffer,
    LeaseLost,
    Overloaded,
    Peer,
    PeerLost,
    Server,
    StoreBuffer,
    TensorSpec,
    connect,
    serve,
)
from asynckv.buffers.remote.store import RemoteGet, begin_put
from asynckv.links.link import Link, LinkStream
from asynckv.protocol.frames import (
    Cancel,
    Offer,
    Put,
    Result,
    Took,
)
from asynckv.protocol.transfer_frames import Grant, Sent
from asynckv.protocol.wire import digest_of
from asynckv.tensors.views import bytes_of, spec_of
from asynckv.testing import until, until_blocked
from asynckv.testing.expectations import only
from asynckv.testing.lookup_checks.values import cancelled
from asynckv.transfers.delivery import ReceiveBudget
from asynckv.transfers.source import HostSource
from harness.link_pairs import LinkPair, held_lanes, linked
from harness.raw_inserts import NoRoutes, body_with

MIB = 2**20


@pytest.fixture
async def store() -> AsyncIterator[StoreBuffer]:
    async with StoreBuffer("16MiB") as store:
        yield store


@pytest.fixture
async def server(store: StoreBuffer) -> AsyncIterator[Server]:
    async with serve("tcp://127.0.0.1:0", store=store) as server:
        yield server


@pytest.fixture
async def peer(server: Server) -> AsyncIterator[Peer]:
    async with connect(server.url, max_bytes="4MiB", reconnect_s=5) as peer:
        yield peer


async def test_any_number_of_keys_is_asked_for(peer: Peer) -> None:
    await peer.store.put("7", torch.ones(3))
    found = await peer.store.contains([str(n) for n in range(9000)])
    assert len(found) == 9000 and [i for i, is_in in enumerate(found) if is_in] == [7]
    assert await peer.store.contains([]) == ()
    assert not any(await peer.store.contains(["\u20ac" * 512] * 100))


async def test_a_value_beyond_the_receive_bound_needs_into(peer: Peer) -> None:
    await peer.store.put("key", torch.ones(2 * MIB))
    with pytest.raises(EntryTooLarge):
        await peer.store.get("key")
    into = torch.zeros(2 * MIB)
    assert await peer.store.get("key", into) is into and bool(into.all())
    assert peer.budget.used_bytes == 0


async def test_without_digests_on_one_link_others_still_verify(
    server: Server,
    peer: Peer,
) -> None:
    async with connect(server.url, digest="off") as careless:
        await careless.store.put("key", torch.ones(MIB))
        assert await careless.store.get("key") is not None
    assert bool(only(await peer.store.get("key")).all())


async def test_a_get_is_made_again_on_the_next_link(
    server: Server,
    peer: Peer,
    store: StoreBuffer,
    cut_when: Callable[[Link, type], None],
) -> None:
    await store.put("key", torch.ones(MIB))
    (services,) = server._services
    cut_when(services.link, object)
    assert bool(only(await peer.store.get("key")).all()) and not peer.budget.used_bytes
    await store.delete("key")
    await until(lambda: not store.statistics().used_bytes)


@pytest.mark.parametrize("is_lost", [False, True])
async def test_a_get_ends_when_no_lane_writes_where_it_was_to_land(
    server: Server, store: StoreBuffer, *, is_lost: bool
) -> None:
    await store.put("key", torch.ones(MIB))
    async with connect(server.url, reconnect_s=0) as peer:
        with held_lanes("receive") as are_held:
            get = asyncio.create_task(peer.store.get("key", torch.zeros(MIB)))
            await until(are_held.is_set)
            (await peer.link()).abort() if is_lost else get.cancel()
            await until_blocked(get)
            assert not get.done()
        with pytest.raises(PeerLost if is_lost else asyncio.CancelledError):
            await get


async def test_statistics_tell_what_is_under_way(peer: Peer) -> None:
    now = peer.store.statistics()
    assert (now.getting, now.waiting_puts, now.is_connected) == (0, 0, True)
    with pytest.raises(TypeError, match="not one key"):
        await peer.store.contains("key")
    await peer.store.aclose()
    assert not peer.store.statistics().is_connected
    peer.store.abort()


async def test_statistics_count_what_was_found_and_what_was_not(
    peer: Peer,
) -> None:
    await peer.store.put("here", torch.ones(1))
    for key in ("here", "there", "here"):
        await peer.store.get(key)
    now = peer.store.statistics()
    assert (now.hits, now.misses) == (2, 1)


async def test_what_is_no_tensor_is_refused_alike_here_and_at_a_peer(
    peer: Peer,
    store: StoreBuffer,
) -> None:
    for each in (store, peer.store):
        with pytest.raises(TypeError, match="a value is a tensor, not list"):
            await each.put("key", [1.0])  # type: ignore[arg-type]


@pytest.mark.parametrize("flag", ["yes", 1, None, torch.ones(2)])
async def test_what_is_no_flag_is_refused_alike_here_and_at_a_peer(
    peer: Peer, store: StoreBuffer, flag: bool
) -> None:
    for each in (store, peer.store):
        for value in (torch.ones(1), None):
            with pytest.raises(TypeError, match="pin is True or False, not"):
                await each.put("key", value, pin=flag)
        with pytest.raises(TypeError, match="prefix is True or False, not"):
            async with each.pin(["key"], prefix=flag):
                pass
        await each.put("key", torch.ones(1))  # nobody else is hurt by it


async def test_many_that_are_no_pairs_are_refused_in_words(peer: Peer) -> None:
    with pytest.raises(TypeError, match=r"pairs of a key and a tensor.*\.items\(\)"):
        await peer.store.put_many({"a": torch.ones(1)})  # type: ignore[dict-item]
    with pytest.raises(ValueError, match="into has 1 places for 2 keys"):
        await peer.store.get_many(["a", "b"], [torch.ones(1)])


def getting_on(link: Link, into: torch.Tensor | None = None) -> RemoteGet:
    return RemoteGet(link, "key", into, NoRoutes(budget=ReceiveBudget(2 * MIB)))


def offer_of(stream: LinkStream, *names: str) -> None:
    body = body_with(dict.fromkeys(names, TensorSpec((MIB,), "uint8")))
    stream.send(Offer(transfer=2, inline=False), body)


@pytest.fixture
async def offering() -> AsyncIterator[LinkPair]:
    """A link whose far side offers a large value."""
    async with linked("mem://", lambda stream, *_: offer_of(stream, "value")) as pair:
        yield pair


async def granted(pair: LinkPair) -> LinkStream:
    await until(lambda: bool(pair.service.hearers))
    assert await pair.service.hearers[0].next() == (Grant(2), b"")
    return pair.service.asked[0][0]


@pytest.mark.parametrize("lent", [False, True])
async def test_few_bytes_ride_with_the_offer(*, lent: bool) -> None:
    source, into = torch.arange(3), torch.zeros(3, dtype=torch.int64)
    piece = bytes_of(source)
    body = body_with({"value": spec_of(source)}, [piece], digests=[digest_of(piece)])

    def answer(stream: LinkStream, *_: object) -> None:
        stream.send(Offer(transfer=2, inline=True), body)
        stream.send(Result(1))

    async with linked("mem://", answer) as pair:
        tensor = await getting_on(pair.near, into if lent else None).value()
        assert tensor is not None and tensor.tolist() == [0, 1, 2]
        assert lent == (tensor is into)


@pytest.mark.parametrize("lent", [False, True])
async def test_a_value_that_is_given_up_lands_no_more(
    offering: LinkPair, *, lent: bool
) -> None:
    into = torch.zeros(MIB, dtype=torch.uint8) if lent else None
    getting = getting_on(offering.near, into)
    value = asyncio.create_task(getting.value())
    await granted(offering)
    value.cancel()
    getting.cancel()
    await getting.quiesce()
    offering.far.payload.send(2, 0, memoryview(bytearray(b"1" * MIB)), lambda *_: None)
    assert await offering.service.hearers[0].next() == (Cancel(), b"")
    assert into is None or not into.any()


@pytest.mark.parametrize("lent", [False, True])
async def test_the_peer_is_told_when_the_value_has_landed(
    offering: LinkPair, *, lent: bool
) -> None:
    into = torch.zeros(MIB, dtype=torch.uint8) if lent else None
    getting = getting_on(offering.near, into)
    value = asyncio.create_task(getting.value())
    stream, source = await granted(offering), memoryview(bytearray(b"1" * MIB))
    offering.far.payload.send(
        2, 0, source, lambda digest, _: stream.send(Sent(2, 0, digest))
    )
    assert await offering.service.hearers[0].next() == (Took(b""), b"")
    tensor = await value
    assert tensor is not None and tensor.numpy().tobytes() == source
    assert lent == (tensor is into)
    getting.release()


@pytest.mark.parametrize(
    ("url", "last"),
    [("mem://", None), ("tcp://127.0.0.1:0", None), ("mem://", Result(1))],
)
async def test_a_link_lost_or_an_answer_before_the_last_byte_ends_the_wait(
    url: str, last: Result | None
) -> None:
    async with linked(url, lambda stream, *_: offer_of(stream, "value")) as pair:
        value = asyncio.create_task(getting_on(pair.near).value())
        stream = await granted(pair)
        if last is not None:
            stream.send(last)
        else:
            stream.send(Sent(2, 0, b"digest"))
            pair.far.abort()
        with pytest.raises(PeerLost):
            await value
        assert not pair.near.is_open


async def test_bytes_that_changed_are_refused(offering: LinkPair) -> None:
    value = asyncio.create_task(getting_on(offering.near).value())
    stream = await granted(offering)
    offering.far.payload.send(2, 0, memoryview(bytearray(MIB)), lambda *_: None)
    stream.send(Sent(2, 0, b"wrong"))
    with pytest.raises(ChecksumError):
        await value


async def test_a_value_of_several_tensors_breaks_the_link() -> None:
    async with linked(
        "mem://", lambda stream, *_: offer_of(stream, "key", "value")
    ) as pair:
        with pytest.raises(PeerLost, match="one tensor"):
            await getting_on(pair.near).value()


async def test_a_done_of_what_was_not_granted_is_ignored() -> None:
    def answer(stream: LinkStream, *_: object) -> None:
        stream.send(Sent(2, 0, b""))
        stream.send(Result())

    async with linked("mem://", answer) as pair:
        assert await getting_on(pair.near).value() is None


@pytest.mark.usefixtures("no_slabs")
async def test_a_value_for_which_there_is_no_memory_is_refused_alone() -> None:
    body = body_with({"value": TensorSpec((2**48,), "uint8")})

    def answer(stream: LinkStream, *_: object) -> None:
        stream.send(Offer(transfer=2, inline=False), body)

    async with linked("mem://", answer) as pair:
        budget = ReceiveBudget(2**49)
        getting = RemoteGet(pair.near, "key", None, NoRoutes(budget=budget))
        with pytest.raises(EntryTooLarge, match="no memory for"):
            await getting.value()
        getting.cancel()
        getting.release()
        assert pair.near.is_open and not budget.used_bytes


async def test_an_offer_of_what_was_given_up_is_let_go(pair: LinkPair) -> None:
    getting = getting_on(pair.near)
    value = asyncio.create_task(getting.value())
    await until(lambda: bool(pair.service.hearers))
    await cancelled(value)
    offer_of(pair.service.asked[0][0], "value")
    getting.cancel()
    assert await pair.service.hearers[0].next() == (Cancel(), b"")
    await until_blocked()
    assert pair.near.is_open and getting._delivery is None


@pytest.mark.parametrize("digest", ["full", "off"])
async def test_few_bytes_ride_along_with_their_digest(digest: str) -> None:
    side, value = {"digest": digest}, torch.arange(3)
    async with linked("mem://", lambda *_: None, near=side, far=side) as pair:
        begin_put(pair.near, "key", HostSource(value))
        await until(lambda: bool(pair.service.asked))
        _, frame, body = pair.service.asked[0]
        assert isinstance(frame, Put) and frame.inline
        assert (frame.spec, body) == (spec_of(value), bytes(bytes_of(value)))
        assert frame.digest == (digest_of(body) if digest == "full" else b"")


async def test_many_bytes_wait_to_be_granted(pair: LinkPair) -> None:
    begin_put(pair.near, "key", HostSource(torch.zeros(MIB)))
    await until(lambda: bool(pair.service.asked))
    _, frame, body = pair.service.asked[0]
    assert isinstance(frame, Put) and not frame.inline and body == b""


@pytest.mark.parametrize("nbytes", [10, MIB])
async def test_a_cut_link_is_made_again_and_the_put_too(
    nbytes: int, cut_when: Callable[[Link, type], None]
) -> None:
    async with (
        StoreBuffer("16MiB") as local,
        serve("tcp://127.0.0.1:0", store=local) as server,
        connect(server.url) as peer,
    ):
        (services,) = server._services
        cut_when(services.link, object)
        await peer.store.put("key", torch.ones(nbytes))
        assert only(await local.get("key")).nbytes == 4 * nbytes


async def fill(client: KVStoreBuffer, count: int) -> None:
    for number in range(count):
        await client.put(f"filler {number}", torch.ones(MIB, dtype=torch.uint8))


async def test_what_is_pinned_is_not_dropped_for_room() -> None:
    async with StoreBuffer("8MiB") as local, serve("mem://pin", store=local):
        async with connect("mem://pin") as peer:
            for client in (local, peer.store):
                await client.put("a", torch.ones(MIB, dtype=torch.uint8))
                async with client.pin(["a", "b"]) as found:
                    assert found == (True, False)
                    await fill(client, 9)
                    assert await client.contains(["a"]) == (True,)
                await until(lambda: not local.values._values[None]["a"].readers)
                await fill(client, 9)
                assert await client.contains(["a"]) == (False,)


@pytest.mark.parametrize("count", [1, 65], ids=["at once", "in turns"])
async def test_a_hold_ends_with_its_link(count: int) -> None:
    keys = [f"{number}" for number in range(count)]
    async with StoreBuffer(MIB) as local, serve("mem://pin", store=local) as server:
        await local.put_many([(key, torch.ones(9)) for key in keys])
        async with connect("mem://pin", reconnect_s=0) as peer:
            with pytest.raises(LeaseLost):
                async with peer.store.pin(keys) as found:
                    peer.abort()
                    await until(lambda: not server.waiting_bytes)
            await fill(local, 1)
            assert all(found) and not any(await local.contains(keys))


async def test_a_hold_that_is_refused_holds_nothing() -> None:
    async with (
        StoreBuffer("8MiB") as local,
        serve("mem://pin", store=local, max_waiting_bytes=8192) as server,
        connect("mem://pin") as peer,
    ):
        await local.put("a", torch.ones(9))
        async with peer.store.pin(["a"]):
            with pytest.raises(Overloaded):
                async with peer.store.pin(["a", "b"]):
                    raise AssertionError
            assert local.values._values[None]["a"].readers == 1
        await until(lambda: not server.waiting_bytes)
        assert not local.values._values[None]["a"].readers


def read_in(local: StoreBuffer) -> int:
    owned = local.values._values.values()
    return sum(value.readers for values in owned for value in values.values())


async def test_of_a_long_prefix_nothing_is_held_after_the_first_gap() -> None:
    async with StoreBuffer("8MiB") as local, serve("mem://pin", store=local):
        async with connect("mem://pin") as peer:
            keys = [f"a key that is rather long {number:040}" for number in range(2000)]
            await local.put_many([(key, torch.ones(1)) for key in keys])
            async with peer.store.pin(keys, prefix=True) as found:
                assert found == (True,) * 2000
            await local.delete(keys[1])
            for client in (local, peer.store):
                async with client.pin(keys, prefix=True) as found:
                    assert found == (True, *[False] * 1999)
                    await until(lambda: read_in(local) == 1)
