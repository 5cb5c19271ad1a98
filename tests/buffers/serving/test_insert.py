from __future__ import annotations

import asyncio

import pytest

from asynckv.buffers.lookup import LookupBuffer
from asynckv.links.link import Link
from asynckv.protocol.frames import (
    Accepted,
    Cancel,
    Cancelled,
    Failure,
)
from asynckv.protocol.transfer_frames import Grant, Sent
from asynckv.protocol.wire import digest_of
from asynckv.testing.blocked import until
from asynckv.testing.pairs import Peers
from harness.raw_inserts import RawInsert

MIB = 2**20


@pytest.mark.parametrize("streaming", [False, True])
async def test_bytes_that_changed_on_their_way_are_not_committed(
    local: LookupBuffer, link: Link, *, streaming: bool
) -> None:
    raw = RawInsert(link, MIB, streaming=streaming)
    await raw.granted()
    transfer = await raw.push() if streaming else raw.transfer
    link.payload.send(transfer, 0, memoryview(bytes(MIB)), lambda *_: None)
    raw.stream.send(Sent(transfer, 0, b"of other bytes.."))
    last = await raw.last()
    assert isinstance(last, Failure) and last.code == "ChecksumError"
    assert local.statistics().used_bytes == 0


async def test_inline_bytes_that_changed_are_not_committed(
    local: LookupBuffer, link: Link
) -> None:
    last = await RawInsert(link, inline=b"abc", digest=b"wrong").last()
    assert isinstance(last, Failure) and last.code == "ChecksumError"
    assert local.statistics().used_bytes == 0 and link.is_open


async def test_more_than_rides_along_by_the_rules_is_asked_for_by_payload(
    local: LookupBuffer, link: Link
) -> None:
    raw = RawInsert(link, inline=bytes(MIB))
    assert await raw.hearer.next() == (Grant(raw.transfer), b"")
    good = memoryview(b"x" * MIB)
    link.payload.send(raw.transfer, 0, good, lambda *_: None)
    raw.stream.send(Sent(raw.transfer, 0, digest_of(good)))
    assert await raw.last() == Accepted()
    entry = await local.drop_select()
    assert bool((entry.key["0"] == ord("x")).all())  # type: ignore[index]


async def test_an_entry_without_tensors_waits_for_no_bytes(
    local: LookupBuffer, link: Link
) -> None:
    assert await RawInsert(link).last() == Accepted()
    entry = await local.drop_select()
    assert (entry.entry_id, entry.key) == ("it", None)


@pytest.mark.parametrize("digest", [digest_of(bytes(MIB)), b"of other bytes.."])
async def test_a_cancel_with_the_last_word_behind_it_is_a_cancel(
    local: LookupBuffer, link: Link, digest: bytes
) -> None:
    raw = RawInsert(link, MIB)
    await raw.granted()
    sent = asyncio.Event()
    link.payload.send(raw.transfer, 0, memoryview(bytes(MIB)), lambda *_: sent.set())
    await sent.wait()
    raw.stream.send(Cancel())
    raw.stream.send(Sent(raw.transfer, 0, digest))
    assert await raw.last() == Cancelled()
    assert local.statistics().entries == 0


@pytest.mark.parametrize("streaming", [False, True])
async def test_a_cancelled_insert_ends_by_one_last_frame(
    local: LookupBuffer, link: Link, *, streaming: bool
) -> None:
    raw = RawInsert(link, MIB, streaming=streaming)
    await raw.granted()
    raw.stream.send(Cancel())
    raw.stream.send(Cancel())
    assert await raw.last() == Cancelled()
    assert local.statistics().used_bytes == 0 and link.is_open


@pytest.mark.parametrize("streaming", [False, True])
async def test_a_producer_lost_midway_leaves_no_trace(
    local: LookupBuffer, link: Link, *, streaming: bool
) -> None:
    raw = RawInsert(link, MIB, streaming=streaming)
    await raw.granted()
    if streaming:
        await raw.push()
    link.abort()
    await until(lambda: not local.statistics().entries)
    assert local.statistics().used_bytes == 0


async def test_a_roi_comes_with_its_tokens(peers: Peers, local: LookupBuffer) -> None:
    await peers.producer.lookup.insert([1, 2, 3], [0, 1, 1], None, None, None)
    assert await local.peek([2, 3]) == 2
    assert await local.peek([1, 2]) == 0


@pytest.mark.parametrize("inline", [None, b"abc"])
async def test_a_fault_of_ours_is_logged_and_fails_that_request_alone(
    local: LookupBuffer,
    link: Link,
    inline: bytes | None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(*_: object) -> None:
        raise LookupError("a fault of ours")

    monkeypatch.setattr(local.ledger.table, "admit", fail)
    assert isinstance(await RawInsert(link, 3, inline=inline).last(), Failure)
    assert caplog.messages == ["a request failed by a fault of ours"]
    monkeypatch.undo()
    assert await RawInsert(link).last() == Accepted()
