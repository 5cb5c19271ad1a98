from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import torch

from asynckv.buffers import serve_insert
from asynckv.buffers.lookup import LookupBuffer
from asynckv.buffers.manifest import pack
from asynckv.buffers.serve import serve
from asynckv.errors import EntryAborted
from asynckv.links.dial import dial
from asynckv.links.link import Link
from asynckv.links.requests import LinkStream
from asynckv.protocol.digests import digest_of
from asynckv.protocol.frames import (
    Accepted,
    Cancel,
    Cancelled,
    Commit,
    Done,
    Failure,
    Frame,
    Grant,
    Insert,
    Push,
    Retract,
)
from asynckv.protocol.values import TensorRecord
from asynckv.testing.blocked import until, until_blocked
from asynckv.testing.link_pairs import Hearer, name_of
from asynckv.testing.pairs import Peers
from asynckv.transports.mem import MemTransport
from asynckv.types import TensorSpec

MIB = 2**20
SPEC = TensorSpec((MIB,), "uint8")


@pytest.fixture
async def link(local: LookupBuffer) -> AsyncIterator[Link]:
    """A producer that says what it likes."""
    async with serve("mem://", lookup=local) as server:
        link = await dial(server.url, identity=name_of("producer"))
        try:
            yield link
        finally:
            await link.aclose()


def inserting(
    link: Link, *, streaming: bool, inline: bool = False, digest: bytes = b""
) -> tuple[Hearer, LinkStream, int]:
    hearer, transfer = Hearer(), link.new_transfer()
    frame = Insert("it", transfer, inline=inline, streaming=streaming)
    spec = TensorSpec((3,), "uint8") if inline else SPEC
    pieces = [memoryview(b"abc")] if inline else []
    body = pack([TensorRecord("key", spec, digest)], None, None, pieces)
    return hearer, link.open_stream(hearer, frame, body), transfer


async def push(link: Link, hearer: Hearer, stream: LinkStream) -> int:
    transfer = link.new_transfer()
    stream.send(Push(transfer, 0, inline=False))
    while await hearer.next() != (Grant(transfer), b""):
        pass
    return transfer


async def last_of(hearer: Hearer) -> Frame:
    while not isinstance(frame := (await hearer.next())[0], Failure):
        if isinstance(frame, Accepted | Cancelled):
            break
    return frame


@pytest.mark.parametrize("streaming", [False, True])
async def test_bytes_that_changed_on_their_way_are_not_committed(
    local: LookupBuffer, link: Link, *, streaming: bool
) -> None:
    hearer, stream, transfer = inserting(link, streaming=streaming)
    await hearer.next()
    if streaming:
        transfer = await push(link, hearer, stream)
    link.payload.send(transfer, 0, memoryview(bytes(MIB)), lambda *_: None)
    stream.send(Done(transfer, 0, b"of other bytes.."))
    last = await last_of(hearer)
    assert isinstance(last, Failure) and last.code == "ChecksumError"
    assert local.statistics().used_bytes == 0


async def test_inline_bytes_that_changed_are_not_committed(
    local: LookupBuffer, link: Link
) -> None:
    hearer, _, _ = inserting(link, streaming=False, inline=True, digest=b"wrong")
    last = await last_of(hearer)
    assert isinstance(last, Failure) and last.code == "ChecksumError"
    assert local.statistics().used_bytes == 0 and link.is_open


async def test_a_put_made_again_with_other_bytes_is_what_is_committed(
    local: LookupBuffer, link: Link
) -> None:
    hearer, stream, _ = inserting(link, streaming=True)
    await hearer.next()
    for _ in range(3):
        first = await push(link, hearer, stream)
        link.payload.send(first, 0, memoryview(bytes(MIB)), lambda *_: None)
        stream.send(Retract(first))
        stream.send(Push(again := link.new_transfer(), 0, inline=False))
        stream.send(Retract(again))
        link.payload.stop(first)
    last = await push(link, hearer, stream)
    good = memoryview(b"x" * MIB)
    link.payload.send(last, 0, good, lambda *_: None)
    stream.send(Done(last, 0, digest_of(good)))
    stream.send(Commit())
    assert await last_of(hearer) == Accepted()
    entry = await local.drop_select()
    assert bool((entry.key == ord("x")).all())  # type: ignore[union-attr]


async def test_a_tensor_pushed_twice_breaks_the_link(link: Link) -> None:
    hearer, stream, _ = inserting(link, streaming=True)
    await hearer.next()
    await push(link, hearer, stream)
    stream.send(Push(link.new_transfer(), 0, inline=False))
    await until(lambda: not link.is_open)
    assert "pushed twice" in str(link.error)


async def test_a_tensor_pushed_before_there_is_room_breaks_the_link(
    local: LookupBuffer, link: Link
) -> None:
    _, stream, _ = inserting(link, streaming=True)
    stream.send(Push(link.new_transfer(), 7, inline=False))
    await until(lambda: not link.is_open)
    assert "never granted" in str(link.error)


async def test_a_writer_that_falls_silent_has_failed(
    local: LookupBuffer, link: Link, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve_insert, "SILENCE_S", 0.02)
    hearer, _, _ = inserting(link, streaming=True)
    last = await last_of(hearer)
    assert isinstance(last, Failure) and last.reason == "producer"
    assert local.statistics().aborted == 1


async def test_a_writer_whose_tensor_comes_slowly_has_not_failed(
    link: Link, monkeypatch: pytest.MonkeyPatch
) -> None:
    landed = [1, 2, 3, 3]
    monkeypatch.setattr(serve_insert, "SILENCE_S", 0.02)
    monkeypatch.setattr(
        MemTransport, "landed_bytes", lambda self, transfer: landed.pop(0)
    )
    hearer, stream, _ = inserting(link, streaming=True)
    await hearer.next()
    await push(link, hearer, stream)
    last = await last_of(hearer)
    assert isinstance(last, Failure) and last.reason == "producer"
    assert landed == []


@pytest.mark.parametrize("streaming", [False, True])
async def test_a_cancelled_insert_ends_by_one_last_frame(
    local: LookupBuffer, link: Link, *, streaming: bool
) -> None:
    hearer, stream, _ = inserting(link, streaming=streaming)
    await hearer.next()
    stream.send(Cancel())
    stream.send(Cancel())
    assert await last_of(hearer) == Cancelled()
    assert local.statistics().used_bytes == 0 and link.is_open


@pytest.mark.parametrize("streaming", [False, True])
async def test_a_producer_lost_midway_leaves_no_trace(
    local: LookupBuffer, link: Link, *, streaming: bool
) -> None:
    hearer, stream, _ = inserting(link, streaming=streaming)
    await hearer.next()
    if streaming:
        await push(link, hearer, stream)
    link.abort()
    await until(lambda: not local.statistics().entries)
    assert local.statistics().used_bytes == 0


async def test_consumers_of_a_lost_producer_learn_or_wait_again(
    peers: Peers, local: LookupBuffer
) -> None:
    specs = {"0.key": SPEC, "1.key": SPEC}
    with pytest.raises(ValueError, match="not put"):
        async with peers.producer.lookup.open_insert(
            [1], None, specs, deliveries=2
        ) as writer:
            await writer.put("0.key", torch.ones(MIB, dtype=torch.uint8))
            plain = asyncio.create_task(local.drop_select([1]))
            await until_blocked(plain)
            async with peers.consumer.lookup.open_drop_select([1]) as stream:
                await stream.wait_for("0.key")
                peers.producer.abort()
                with pytest.raises(EntryAborted, match="producer"):
                    await stream.wait_for("1.key")
                raise ValueError("not put")
    await local.insert([1], None, None, None, None, entry_id="next")
    assert (await plain).entry_id == "next"
