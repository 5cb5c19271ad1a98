"""What a peer inserts and pushes, and says what it likes of."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

import pytest
import torch

from asynckv import (
    EntryAborted,
    LookupBuffer,
    Peer,
    PeerLost,
    Server,
    TensorSpec,
    serve,
)
from asynckv.buffers.serving import service
from asynckv.buffers.serving.pushes import ServedPushes
from asynckv.buffers.serving.service import Silence
from asynckv.links.dial import dial
from asynckv.links.link import Link
from asynckv.protocol.frames import (
    Accepted,
    Cancel,
    Cancelled,
    Commit,
    Failure,
    Push,
    Retract,
    Took,
)
from asynckv.protocol.transfer_frames import Grant, Sent
from asynckv.protocol.wire import digest_of
from asynckv.testing import until, until_blocked
from asynckv.testing.lookup_checks.values import started
from asynckv.testing.pairs import Peers
from asynckv.transports.mem import MemTransport
from asynckv.waits.waiting import wait_shielded
from harness.fake_devices import fake_device
from harness.held_copies import held_copies
from harness.link_pairs import dialled, name_of
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
    assert (await raw.failure()).code == "ChecksumError"
    assert local.statistics().used_bytes == 0


async def test_inline_bytes_that_changed_are_not_committed(
    local: LookupBuffer, link: Link
) -> None:
    raw = RawInsert(link, inline=b"abc", digest=b"wrong")
    assert (await raw.failure()).code == "ChecksumError"
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


async def test_memory_of_many_tensors_is_found_in_turns_until_the_entry_has_left(
    local: LookupBuffer, link: Link
) -> None:
    raw = RawInsert(link, *[1024] * 300)
    await until(lambda: _found_in(local) > 0)
    assert _found_in(local) < 300
    local.abort()
    assert (await raw.failure()).code == "BufferClosed"
    assert not local.statistics().used_bytes


def _found_in(buffer: LookupBuffer) -> int:
    """Count the tensors for whose bytes memory was found."""
    entries = buffer.ledger.table.entries.values()
    regions = [part.region for entry in entries for part in entry.parts]
    return sum(one is not None and not one.can_change_hands() for one in regions)


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


@contextlib.asynccontextmanager
async def linked_to(local: LookupBuffer) -> AsyncIterator[tuple[Link, Link]]:
    """A producer that says what it likes, and what the server has of its link."""
    async with serve("mem://", lookup=local) as server:
        link = await dial(server.url, identity=name_of("producer"))
        (services,) = server._services
        try:
            yield link, services.link
        finally:
            await link.aclose()


@pytest.fixture
async def writer(link: Link) -> RawInsert:
    """Of one large tensor, and there is room for it."""
    raw = RawInsert(link, MIB, streaming=True)
    await raw.granted()
    return raw


async def test_a_put_made_again_with_other_bytes_is_what_is_committed(
    writer: RawInsert, local: LookupBuffer, link: Link
) -> None:
    for _ in range(3):
        first = await writer.push()
        link.payload.send(first, 0, memoryview(bytes(MIB)), lambda *_: None)
        writer.stream.send(Retract(first))
        writer.stream.send(Push(again := link.new_transfer(), 0, inline=False))
        writer.stream.send(Retract(again))
        link.payload.stop(first)
    last = await writer.push()
    good = memoryview(b"x" * MIB)
    link.payload.send(last, 0, good, lambda *_: None)
    writer.stream.send(Sent(last, 0, digest_of(good)))
    writer.stream.send(Commit())
    assert await writer.last() == Accepted()
    entry = await local.drop_select()
    assert bool((entry.key["0"] == ord("x")).all())  # type: ignore[index]


async def test_the_last_byte_of_what_was_retracted_does_not_matter(link: Link) -> None:
    raw = RawInsert(link, MIB, 3, streaming=True)
    await raw.granted()
    raw.stream.send(Retract(first := await raw.push()))
    raw.stream.send(Retract(first))
    raw.stream.send(Sent(first, 0, b"digest"))
    await raw.push()
    assert link.is_open


async def test_a_writer_that_falls_silent_has_failed(
    local: LookupBuffer, link: Link, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "SILENCE_S", 0.02)
    assert (await RawInsert(link, MIB, streaming=True).failure()).reason == "producer"
    assert local.statistics().aborted == 1


async def test_a_writer_whose_tensor_comes_slowly_has_not_failed(
    writer: RawInsert, link: Link, monkeypatch: pytest.MonkeyPatch
) -> None:
    landed = [1, 2, 3, 3]
    monkeypatch.setattr(
        MemTransport, "landed_bytes", lambda self, transfer: landed.pop(0)
    )
    transfer = await writer.push()
    monkeypatch.setattr(service, "SILENCE_S", 0.02)
    writer.stream.send(Retract(transfer + 2))  # heard: from now on it is short
    assert (await writer.failure()).reason == "producer"
    assert landed == []


async def test_a_writer_whose_tensor_is_copied_to_a_gpu_has_not_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks, fall_silent = list[Silence](), Silence._fall_silent

    def look(listener: Silence) -> None:
        looks.append(listener)
        fall_silent(listener)

    monkeypatch.setattr(Silence, "_fall_silent", look)
    with fake_device() as gpu:
        async with LookupBuffer("8MiB", device=gpu.device, drain_s=0) as there:
            async with linked_to(there) as (link, _):
                raw = RawInsert(link, MIB, streaming=True)
                await raw.granted()
                transfer, source = await raw.push(), memoryview(bytes(MIB))
                with held_copies(gpu.process) as gate:
                    link.payload.send(transfer, 0, source, lambda *_: None)
                    monkeypatch.setattr(service, "SILENCE_S", 0.02)
                    raw.stream.send(Sent(transfer, 0, digest_of(source)))
                    raw.stream.send(Commit())  # heard: from now on it is short
                    await until(lambda: len(looks) > 2)
                    gate.open()
                    assert await raw.last() == Accepted()


async def test_memory_of_retracted_tensors_is_quiet_at_the_end(
    writer: RawInsert, local: LookupBuffer, link: Link
) -> None:
    writer.stream.send(Retract(await writer.push()))
    writer.stream.send(Cancel())
    assert await writer.last() == Cancelled()
    assert local.statistics().entries == 0


@pytest.mark.parametrize("is_retracted", [False, True])
async def test_an_insert_that_is_cancelled_twice_lets_go_of_all_its_tensors(
    local: LookupBuffer, monkeypatch: pytest.MonkeyPatch, is_retracted: bool
) -> None:
    quiet = asyncio.get_running_loop().create_future()
    async with linked_to(local) as (near, far):
        raw = RawInsert(near, MIB, MIB, streaming=True)
        await raw.granted()
        pushed = [await raw.push(part) for part in (0, 1)]
        if is_retracted:
            for transfer in pushed:
                raw.stream.send(Retract(transfer))
        monkeypatch.setattr(far.payload, "quiesce", lambda _: wait_shielded(quiet))
        for _ in range(2):
            raw.stream.send(Cancel())
            await until_blocked()
        assert len(raw.hearer.frames) == 3
        quiet.set_result(None)
        assert await raw.last() == Cancelled()
        assert not far.progress._transfers  # else the link would end when they stall


@pytest.mark.parametrize("frame", [Push(1, 0, inline=False), Commit()])
async def test_a_word_before_there_is_room_breaks_the_link(
    link: Link, frame: Push | Commit
) -> None:
    RawInsert(link, MIB, streaming=True)  # leaves at once, and the others together
    raw = RawInsert(link, MIB, streaming=True)
    raw.stream.send(frame)
    await until(lambda: not link.is_open)
    assert "never granted" in str(link.error)


async def test_a_writer_that_waits_for_its_id_ends_with_its_link(
    peers: Peers, local: LookupBuffer, far_link: Callable[[Server, Peer], Link]
) -> None:
    first = local.open_insert([1], None, {}, entry_id="it")
    await first.__aenter__()
    far = far_link(peers.server, peers.producer)
    second = peers.producer.lookup.open_insert([1], None, {}, entry_id="it")
    waiting = asyncio.create_task(second.__aenter__())
    await peers.producer.lookup.peek([2])  # its request is there by now
    await until_blocked(waiting)
    peers.producer.abort()
    with pytest.raises(PeerLost):
        await waiting
    await until(lambda: not far.is_open)
    await first.__aexit__(LookupError, LookupError(), None)
    assert await peers.consumer.lookup.peek([1]) == 0
    assert local.statistics().entries == 0


@pytest.mark.usefixtures("no_slabs")
async def test_a_push_for_which_there_is_no_memory_ends_its_writer_alone() -> None:
    async with (
        LookupBuffer(2**49, drain_s=0) as buffer,
        serve("mem://", lookup=buffer) as server,
        dialled(server.url, "peer") as link,
    ):
        raw = RawInsert(link, 2**48, streaming=True)
        await raw.granted()
        raw.stream.send(Push(link.new_transfer(), 0, inline=False))
        assert (await raw.failure()).code == "EntryTooLarge"
        assert link.is_open and buffer.statistics().used_bytes == 0


async def test_what_comes_after_the_end_changes_nothing(
    local: LookupBuffer, link: Link
) -> None:
    raw = RawInsert(link, 3, 3, 3, streaming=True)
    await raw.granted()
    for part, digest in enumerate((b"wrong", b"wrong", b"")):
        raw.push_inline(b"abc", part, digest)
    raw.stream.send(Commit())
    assert (await raw.failure()).code == "ChecksumError"
    assert local.statistics().aborted == 1


async def test_a_cancel_just_behind_the_commit_leaves_nothing_half_done(
    monkeypatch: pytest.MonkeyPatch, link: Link, local: LookupBuffer
) -> None:
    begun = asyncio.Event()

    async def quiesce(self: ServedPushes) -> None:
        begun.set()
        await quiesce_at_once(self)
        await asyncio.Event().wait()

    quiesce_at_once = ServedPushes.quiesce
    monkeypatch.setattr(ServedPushes, "quiesce", quiesce)
    raw = RawInsert(link, 3, streaming=True)
    await raw.granted()
    raw.push_inline(b"abc")
    raw.stream.send(Commit())
    await begun.wait()
    raw.stream.send(Cancel())
    assert await raw.last() == Cancelled()
    assert not local.ledger.table.entries and local.statistics().aborted == 1


async def test_an_entry_acknowledged_early_needs_no_more_tensors(
    local: LookupBuffer, link: Link
) -> None:
    raw = RawInsert(link, 3, 3, 3, streaming=True)
    await raw.granted()
    async with local.open_drop_select() as stream:
        raw.push_inline(b"abc")
        await stream.wait_for("0.key")
    raw.push_inline(b"abc", 1)
    raw.stream.send(Commit())
    assert await raw.last() == Accepted()


async def test_a_writer_learns_with_its_next_tensor_how_its_entry_left(
    local: LookupBuffer, link: Link
) -> None:
    raw = RawInsert(link, 3, 3, streaming=True)
    await raw.granted()
    local.ledger.leases.void(local.ledger.table.entries["it"], "max_deliver")
    raw.push_inline(b"abc")
    assert (await raw.failure()).reason == "max_deliver"


async def test_consumers_of_a_lost_producer_learn_or_wait_again(
    peers: Peers, local: LookupBuffer
) -> None:
    specs = {name: TensorSpec((MIB,), "uint8") for name in ("0.key", "1.key")}
    with pytest.raises(ValueError, match="not put"):
        async with peers.producer.lookup.open_insert(
            [1], None, specs, deliveries=2
        ) as writer:
            await writer.put("0.key", torch.ones(MIB, dtype=torch.uint8))
            plain = await started(local.drop_select([1]))
            async with peers.consumer.lookup.open_drop_select([1]) as stream:
                await stream.wait_for("0.key")
                peers.producer.abort()
                with pytest.raises(EntryAborted, match="producer"):
                    await stream.wait_for("1.key")
                raise ValueError("not put")
    await local.insert([1], None, None, None, None, entry_id="next")
    assert (await plain).entry_id == "next"


async def test_what_is_said_while_a_writer_waits_for_room_hurts_nobody(
    local: LookupBuffer, link: Link
) -> None:
    full = await local.insert([9], None, torch.ones(2 * MIB - 8), None, None)
    raw = RawInsert(link, MIB, streaming=True)
    await until(lambda: local.statistics().waiting_inserts == 1)
    with pytest.raises(LookupError):
        async with local.open_drop_select(entry_id="it"):
            await raw.granted()
            transfer = await raw.push()
            link.payload.send(transfer, 0, memoryview(bytes(MIB)), lambda *_: None)
            raw.stream.send(Sent(transfer, 0, digest_of(bytes(MIB))))
            raw.stream.send(Commit())
            await until(lambda: local.statistics().inserted == 2)
            raise LookupError
    raw.stream.send(Retract(transfer + 2))
    raw.stream.send(Commit())
    await local.withdraw(full)
    assert await raw.last() == Accepted()


Saying = Callable[[RawInsert, int], None]


@pytest.mark.parametrize(
    ("say", "why"),
    [
        (lambda raw, _: raw.stream.send(Took(b"token")), "no Took belongs here"),
        (lambda raw, _: raw.stream.send(Push(99, 0, inline=False)), "pushed twice"),
        (
            lambda raw, transfer: raw.stream.send(
                Push(transfer, 1, inline=True), b"abc"
            ),
            "under one number",
        ),
        (lambda raw, _: raw.push_inline(b"abc", 7), "never declared"),
        (lambda raw, _: raw.push_inline(b"four", 1), "declared size"),
        (lambda raw, _: raw.push_inline(bytes(MIB), 2), "came along with a push"),
    ],
)
async def test_a_push_that_makes_no_sense_breaks_the_link(
    link: Link, say: Saying, why: str
) -> None:
    raw = RawInsert(link, MIB, 3, MIB, streaming=True)
    await raw.granted()
    say(raw, await raw.push())
    await until(lambda: not link.is_open)
    assert why in str(link.error)
