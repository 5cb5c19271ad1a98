from __future__ import annotations

import asyncio

import pytest
import torch

from asynckv.buffers.remote.store import Getting
from asynckv.errors import (
    AsyncKVError,
    ChecksumError,
    EntryTooLarge,
    PeerLost,
    RemoteProtocolError,
)
from asynckv.links.link import Link, LinkStream
from asynckv.protocol.frames import (
    Accepted,
    Cancel,
    Cancelled,
    Frame,
    Offer,
    Result,
    Took,
)
from asynckv.protocol.transfer_frames import Grant, Sent
from asynckv.protocol.wire import digest_of
from asynckv.tensors.views import bytes_of, spec_of
from asynckv.testing.blocked import until, until_blocked
from asynckv.transfers.delivery import ReceiveBudget
from asynckv.types import TensorSpec
from harness.bodies import body_with
from harness.link_pairs import LinkPair, linked
from harness.no_routes import NoRoutes

MIB = 2**20


def getting_on(link: Link, into: torch.Tensor | None = None) -> Getting:
    return Getting(link, "key", into, NoRoutes(budget=ReceiveBudget(2 * MIB)))


def offer(stream: LinkStream, *names: str) -> None:
    body = body_with(dict.fromkeys(names, TensorSpec((MIB,), "uint8")))
    stream.send(Offer(transfer=2, inline=False), body)


async def granted(pair: LinkPair) -> LinkStream:
    await until(lambda: bool(pair.service.hearers))
    assert await pair.service.hearers[0].next() == (Grant(2), b"")
    return pair.service.asked[0][0]


async def test_what_is_not_there_is_none() -> None:
    async with linked("mem://", lambda stream, *_: stream.send(Result())) as pair:
        assert await getting_on(pair.near).value() is None


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
async def test_a_value_that_is_given_up_lands_no_more(*, lent: bool) -> None:
    into = torch.zeros(MIB, dtype=torch.uint8) if lent else None
    async with linked("mem://", lambda stream, *_: offer(stream, "value")) as pair:
        getting = getting_on(pair.near, into)
        value = asyncio.create_task(getting.value())
        await granted(pair)
        value.cancel()
        getting.cancel()
        await getting.quiesce()
        pair.far.payload.send(2, 0, memoryview(bytearray(b"1" * MIB)), lambda *_: None)
        assert await pair.service.hearers[0].next() == (Cancel(), b"")
        assert into is None or not into.any()


@pytest.mark.parametrize("lent", [False, True])
async def test_the_peer_is_told_when_the_value_has_landed(*, lent: bool) -> None:
    into = torch.zeros(MIB, dtype=torch.uint8) if lent else None
    async with linked("mem://", lambda stream, *_: offer(stream, "value")) as pair:
        getting = getting_on(pair.near, into)
        value = asyncio.create_task(getting.value())
        stream, source = await granted(pair), memoryview(bytearray(b"1" * MIB))
        pair.far.payload.send(
            2, 0, source, lambda digest, _: stream.send(Sent(2, 0, digest))
        )
        assert await pair.service.hearers[0].next() == (Took(b""), b"")
        tensor = await value
        assert tensor is not None and tensor.numpy().tobytes() == source
        assert lent == (tensor is into)
        getting.release()


@pytest.mark.parametrize("url", ["mem://", "tcp://127.0.0.1:0"])
async def test_a_link_lost_before_the_last_byte_ends_the_wait(url: str) -> None:
    async with linked(url, lambda stream, *_: offer(stream, "value")) as pair:
        value = asyncio.create_task(getting_on(pair.near).value())
        stream = await granted(pair)
        stream.send(Sent(2, 0, b"digest"))
        pair.far.abort()
        with pytest.raises(PeerLost):
            await value


async def test_an_answer_before_the_value_has_come_ends_the_wait() -> None:
    async with linked("mem://", lambda stream, *_: offer(stream, "value")) as pair:
        value = asyncio.create_task(getting_on(pair.near).value())
        (await granted(pair)).send(Result(1))
        with pytest.raises(PeerLost):
            await value
        assert not pair.near.is_open


async def test_bytes_that_changed_are_refused() -> None:
    async with linked("mem://", lambda stream, *_: offer(stream, "value")) as pair:
        value = asyncio.create_task(getting_on(pair.near).value())
        stream = await granted(pair)
        pair.far.payload.send(2, 0, memoryview(bytearray(MIB)), lambda *_: None)
        stream.send(Sent(2, 0, b"wrong"))
        with pytest.raises(ChecksumError):
            await value


@pytest.mark.parametrize(
    ("last", "kind"), [(Cancelled(), AsyncKVError), (Accepted(), RemoteProtocolError)]
)
async def test_a_last_frame_that_is_no_value_is_raised(
    last: Frame, kind: type[Exception]
) -> None:
    async with linked("mem://", lambda stream, *_: stream.send(last)) as pair:
        with pytest.raises(kind):
            await getting_on(pair.near).value()


async def test_a_value_of_several_tensors_breaks_the_link() -> None:
    async with linked(
        "mem://", lambda stream, *_: offer(stream, "key", "value")
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
        getting = Getting(pair.near, "key", None, NoRoutes(budget=budget))
        with pytest.raises(EntryTooLarge, match="no memory for"):
            await getting.value()
        getting.cancel()
        getting.release()
        assert pair.near.is_open and not budget.used_bytes


async def test_an_offer_of_what_was_given_up_is_let_go() -> None:
    async with linked("mem://", lambda *_: None) as pair:
        getting = getting_on(pair.near)
        value = asyncio.create_task(getting.value())
        await until(lambda: bool(pair.service.hearers))
        value.cancel()
        await asyncio.wait({value})
        offer(pair.service.asked[0][0], "value")
        getting.cancel()
        assert await pair.service.hearers[0].next() == (Cancel(), b"")
        await until_blocked()
        assert pair.near.is_open and getting._delivery is None
