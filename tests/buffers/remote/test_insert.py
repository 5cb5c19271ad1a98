"""Inserts at a peer: whole, layer by layer, cut off, made again."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import torch

from asynckv import (
    EntryAborted,
    EntryTooLarge,
    LookupBuffer,
    Peer,
    PeerLost,
    Server,
    TensorSpec,
    connect,
    serve,
)
from asynckv.buffers.entries.entries import make_draft
from asynckv.buffers.remote.insert import RemoteSend, RemoteWriter, begin_insert
from asynckv.links.link import Link, LinkStream
from asynckv.links.options import Digest
from asynckv.protocol.frames import (
    Accepted,
    Cancelled,
    Insert,
    Push,
    Retract,
)
from asynckv.protocol.transfer_frames import Grant
from asynckv.tensors.views import bytes_of, spec_of
from asynckv.testing import until, until_blocked
from asynckv.testing.lookup_checks.values import cancelled, started
from asynckv.testing.pairs import Peers
from asynckv.transfers.source import HostSource
from harness.buffer_fixtures import CutWhen
from harness.link_pairs import LinkPair, held_lanes, linked
from harness.raw_inserts import NoRoutes

FarLink = Callable[[Server, Peer], Link]

LARGE = 2**20


async def test_what_one_frame_cannot_hold_is_refused_and_the_link_stays(
    peers: Peers, local: LookupBuffer
) -> None:
    tokens = torch.zeros(2**21 + 10, dtype=torch.int64)
    with pytest.raises(EntryTooLarge):
        await peers.producer.lookup.insert(tokens, None, None, None, None)
    with pytest.raises(ValueError, match="ride in one frame"):
        await peers.producer.lookup.drop_select(tokens)
    with pytest.raises(ValueError, match="ride in one frame"):
        await peers.producer.lookup.peek(tokens)
    with pytest.raises(EntryTooLarge):
        async with peers.producer.lookup.open_insert(tokens, None, {}):
            pass
    assert await peers.producer.lookup.peek([1]) == 0


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]
)
async def test_what_kv_caches_are_made_of_is_what_comes_out(
    peers: Peers, dtype: torch.dtype
) -> None:
    cache = torch.randn(4, 2, 8).to(dtype)
    for key in (cache, cache[:, 1], cache.transpose(0, 1)):
        await peers.producer.lookup.insert([1], None, key, None, None)
        entry = await peers.consumer.lookup.drop_select([1])
        found = entry.key_tensor
        assert (found.dtype, found.shape) == (dtype, key.shape)
        assert bytes(bytes_of(found)) == bytes(bytes_of(key.contiguous()))


@pytest.mark.parametrize("nbytes", [None, 10, LARGE])
@pytest.mark.parametrize("name", [None, "it"])
async def test_an_answer_lost_with_the_link_commits_once(
    peers: Peers,
    local: LookupBuffer,
    far_link: FarLink,
    cut_when: CutWhen,
    nbytes: int | None,
    name: str | None,
) -> None:
    key = None if nbytes is None else torch.ones(nbytes)
    cut_when(far_link(peers.server, peers.producer), Accepted)
    await peers.producer.lookup.insert([1], None, key, None, None, entry_id=name)
    now = local.statistics()
    assert (now.entries, now.inserted) == (1, 1)


async def test_a_link_cut_in_mid_transfer_is_no_conflict(
    peers: Peers, local: LookupBuffer, far_link: FarLink, cut_when: CutWhen
) -> None:
    cut_when(far_link(peers.server, peers.producer), Grant)
    key = torch.rand(LARGE // 4)
    await peers.producer.lookup.insert([1], None, key, None, None, entry_id="it")
    assert torch.equal((await local.drop_select([1])).key, key)  # type: ignore[arg-type]


async def test_a_retry_waits_for_the_end_of_what_was_cancelled(peers: Peers) -> None:
    insert, key = peers.producer.lookup.insert, torch.ones(2**18)
    for n in range(20):
        first = asyncio.create_task(insert([n], None, key, None, None, entry_id=f"{n}"))
        for _ in range(n):
            await asyncio.sleep(0)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        await insert([n], None, key, None, None, entry_id=f"{n}")
        assert await peers.consumer.lookup.withdraw(f"{n}")


async def test_equal_inserts_at_once_succeed_and_leave_one_entry(
    peers: Peers, local: LookupBuffer
) -> None:
    insert, key = peers.producer.lookup.insert, torch.ones(LARGE)
    calls = [insert([1], None, key, None, None, entry_id="it") for _ in range(3)]
    async with asyncio.timeout(20):
        assert await asyncio.gather(*calls) == ["it"] * 3
    assert local.statistics().inserted == 1


@pytest.mark.parametrize("digest", ["off", "full"])
@pytest.mark.parametrize("nbytes", [0, 10, LARGE])
async def test_without_digests_the_same_entry_is_still_the_same(
    local: LookupBuffer, nbytes: int, digest: Digest
) -> None:
    key = torch.ones(nbytes)
    async with (
        serve("tcp://127.0.0.1:0", lookup=local, digest=digest) as server,
        connect(server.url, digest="off") as peer,
        connect(server.url) as consumer,
    ):
        for _ in range(2):
            await peer.lookup.insert([1], None, key, None, None, entry_id="it")
        assert torch.equal((await consumer.lookup.drop_select([1])).key, key)  # type: ignore[arg-type]


MIB = 2**20

SPECS = {"key": TensorSpec((MIB,), "uint8")}

ONES = torch.ones(MIB, dtype=torch.uint8)


async def test_leaving_while_a_put_is_under_way_aborts(
    peers: Peers, local: LookupBuffer
) -> None:
    with pytest.raises(ValueError, match="not put: key"):
        async with peers.producer.lookup.open_insert([1], None, SPECS) as writer:
            put = asyncio.create_task(writer.put("key", ONES))
            await asyncio.sleep(0)
    await asyncio.wait({put})
    assert put.exception() is None or isinstance(put.exception(), EntryAborted)
    await until(lambda: local.statistics().used_bytes == 0)


async def test_a_put_after_the_entry_was_acknowledged_is_in_vain(
    peers: Peers, local: LookupBuffer
) -> None:
    async with peers.producer.lookup.open_insert([1], None, SPECS) as writer:
        async with local.open_drop_select([1]):
            pass
        await writer.put("key", ONES)
    assert local.statistics().entries == 0


async def test_a_put_after_the_entry_left_is_refused(
    peers: Peers, local: LookupBuffer
) -> None:
    with pytest.raises(EntryAborted, match="closed"):
        async with peers.producer.lookup.open_insert([1], None, SPECS) as writer:
            local.abort()
            await until_blocked()
            for _ in range(50):
                await asyncio.sleep(0)
            await writer.put("key", ONES)


async def test_a_streaming_insert_does_not_survive_its_link(
    peers: Peers, local: LookupBuffer
) -> None:
    with pytest.raises(PeerLost):
        async with peers.producer.lookup.open_insert([1], None, SPECS) as writer:
            (await peers.producer.link()).abort()
            await writer.put("key", ONES)
    await until(lambda: local.statistics().used_bytes == 0)


async def pushed(pair: LinkPair) -> Push:
    """Wait for the first tensor that a writer pushes."""
    await until(lambda: bool(pair.service.hearers))
    push, _ = await pair.service.hearers[0].next_of(Push)
    return push


def writer_on(link: Link) -> RemoteWriter:
    draft = make_draft(
        [1], None, SPECS, entry_id="it", fingerprint=None, ttl_s=1, deliveries=1
    )
    return RemoteWriter(link, draft, NoRoutes())


async def test_an_insert_that_the_peer_gives_up_is_aborted() -> None:
    async with linked("mem://", lambda stream, *_: stream.send(Cancelled())) as pair:
        with pytest.raises(EntryAborted, match="producer"):
            await writer_on(pair.near).granted()


@pytest.mark.parametrize("later", [0, 2], ids=["over", "never offered"])
async def test_what_is_granted_when_it_is_over_is_ignored(
    pair: LinkPair, later: int
) -> None:
    writer = writer_on(pair.near)
    put = asyncio.create_task(writer.put("key", ONES))
    push = await pushed(pair)
    await cancelled(put)
    stream = pair.service.asked[0][0]
    stream.send(Grant(push.transfer + later))
    stream.send(Accepted())
    if later:
        await until(lambda: not pair.near.is_open)
        assert "never offered" in str(pair.near.error)
    else:
        await writer.granted()
        assert pair.near.is_open


async def test_a_put_that_is_cancelled_is_taken_back(pair: LinkPair) -> None:
    put = asyncio.create_task(writer_on(pair.near).put("key", ONES))
    push = await pushed(pair)
    await cancelled(put)
    frame, _ = await pair.service.hearers[0].next()
    assert put.cancelled() and frame == Retract(push.transfer)


async def test_a_put_that_nobody_needs_any_more_sends_nothing(pair: LinkPair) -> None:
    put = asyncio.create_task(writer_on(pair.near).put("key", ONES))
    await until(lambda: bool(pair.service.hearers))
    await pair.service.hearers[0].next()
    pair.service.asked[0][0].send(Accepted())
    await put
    assert len(pair.service.hearers[0].frames) == 1


async def test_a_put_that_nobody_needs_while_it_is_sent_returns_quiet(
    pair: LinkPair,
) -> None:
    writer = writer_on(pair.near)
    put = asyncio.create_task(writer.put("key", ONES))
    push = await pushed(pair)
    # Heard in one go: over a link something may be sent in between.
    writer.on_frame(Grant(push.transfer), b"")
    writer.on_frame(Accepted(), b"")
    await put
    target, landed = memoryview(bytearray(MIB)), list[object]()
    pair.far.payload.receive(push.transfer, 0, target, lambda *end: landed.append(end))
    await asyncio.gather(*[asyncio.sleep(0) for _ in range(20)])
    assert not landed and not any(target[:100])
    assert len(pair.service.hearers[0].frames) == 1


async def test_a_put_that_nobody_needs_when_it_may_be_sent_sends_nothing(
    pair: LinkPair,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waiting: list[Callable[[], None]] = []
    monkeypatch.setattr(type(pair.near), "outgoing_bytes", 5 * MIB)
    monkeypatch.setattr(pair.near, "call_when_drained", waiting.append)
    put = asyncio.create_task(writer_on(pair.near).put("key", ONES))
    await until(lambda: bool(waiting and pair.service.asked))
    pair.service.asked[0][0].send(Accepted())
    await until_blocked()
    monkeypatch.undo()
    waiting[0]()
    await put
    assert not pair.service.hearers[0].frames


async def test_a_put_that_a_lane_could_not_send_fails_with_its_link() -> None:
    async with linked("tcp://127.0.0.1:0", lambda *_: None) as pair:
        put = asyncio.create_task(writer_on(pair.near).put("key", ONES))
        push = await pushed(pair)
        pair.service.asked[0][0].send(Grant(push.transfer))
        pair.far.payload.abort()
        with pytest.raises(PeerLost):
            await put


async def test_small_tensors_wait_while_the_peer_has_much_to_read(
    peers: Peers, monkeypatch: pytest.MonkeyPatch
) -> None:
    specs = {"key": TensorSpec((10,), "uint8")}
    async with peers.producer.lookup.open_insert([1], None, specs) as writer:
        link = await peers.producer.link()
        monkeypatch.setattr(type(link), "outgoing_bytes", 5 * MIB)
        waiting: list[object] = []
        monkeypatch.setattr(link, "call_when_drained", waiting.append)
        put = await started(writer.put("key", ONES[:10]))
        assert not put.done() and len(waiting) == 1
        monkeypatch.undo()
        waiting[0]()  # type: ignore[operator]
        await put


def sending_on(link: Link, *tensors: torch.Tensor) -> RemoteSend:
    specs = {f"{i}.key": spec_of(tensor) for i, tensor in enumerate(tensors)}
    draft = make_draft(
        [1], None, specs, entry_id="it", fingerprint=None, ttl_s=1, deliveries=1
    )
    return begin_insert(link, draft, [HostSource(tensor) for tensor in tensors])


async def asked(pair: LinkPair) -> tuple[LinkStream, int]:
    """Wait for an insert; return the far side's stream, and what it would transfer."""
    await until(lambda: bool(pair.service.asked))
    stream, frame, _ = pair.service.asked[0]
    assert isinstance(frame, Insert)
    return stream, frame.transfer


async def test_what_rides_along_is_known_by_its_digest(pair: LinkPair) -> None:
    for value in (1, 2, 2):
        sending_on(pair.near, torch.full((8,), value))
    await until(lambda: len(pair.service.asked) == 3)
    inserts = [frame for _, frame, _ in pair.service.asked if isinstance(frame, Insert)]
    first, second, again = (insert.digest for insert in inserts)
    assert first and first != second == again


async def test_a_grant_that_crosses_the_cancellation_sends_nothing(
    pair: LinkPair,
) -> None:
    key = torch.ones(LARGE, dtype=torch.uint8)
    sending = sending_on(pair.near, key)
    stream, transfer = await asked(pair)
    target, landed = memoryview(bytearray(LARGE)), list[object]()
    pair.far.payload.receive(transfer, 0, target, lambda *end: landed.append(end))
    stream.send(Grant(transfer))
    sending.cancel()
    await sending.quiesce()
    await until(lambda: sending.may_be_in)
    await asyncio.gather(*[asyncio.sleep(0) for _ in range(20)])
    assert not landed and not any(target[:100])


async def test_after_a_cancellation_what_was_leaving_may_be_overwritten() -> None:
    async with linked(answer=lambda *_: None, near={"lanes": 1}) as pair:
        for turn in range(16):
            key = torch.ones(8 * LARGE, dtype=torch.uint8)
            target = bytearray(key.nbytes)
            await cancel_at(pair, key, target, place=turn * LARGE // 4)
            key.fill_(2)
            last = await_part(pair.far, 999 + 2 * turn, 0, bytearray(LARGE))
            one = memoryview(bytes(LARGE))
            pair.near.payload.send(999 + 2 * turn, 0, one, lambda *_: None)
            await last  # by the same lane, behind all that was on its way
            assert 2 not in target


async def cancel_at(
    pair: LinkPair, key: torch.Tensor, target: bytearray, place: int
) -> None:
    """Cancel an insert while a lane is at it: when so much has landed."""
    before = len(pair.service.asked)
    task = asyncio.create_task(sending_on(pair.near, key).accepted())
    await until(lambda: len(pair.service.asked) > before)
    stream, frame, _ = pair.service.asked[-1]
    assert isinstance(frame, Insert)
    await_part(pair.far, frame.transfer, 0, target)
    stream.send(Grant(frame.transfer))
    await until(lambda: bool(target[place]))
    task.cancel()
    await asyncio.wait({task})
    stream.close()


def await_part(
    link: Link, transfer: int, part: int, target: bytearray
) -> asyncio.Future[None]:
    """Let a part land; return what is done when it has."""
    landed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    memory = memoryview(target)
    link.payload.receive(transfer, part, memory, lambda *_: landed.set_result(None))
    return landed


async def test_what_fails_while_it_is_cancelled_is_silent(pair: LinkPair) -> None:
    sending = sending_on(pair.near)
    task = await started(sending.accepted())
    sending.on_lost(PeerLost("cut"))
    await cancelled(task)
    assert task.cancelled()


async def test_a_lost_link_is_no_error_of_the_request(pair: LinkPair) -> None:
    task = asyncio.create_task(sending_on(pair.near).accepted())
    await asked(pair)
    pair.far.abort()
    assert await task is False


async def test_what_a_lane_could_not_send_is_not_done(
    pair: LinkPair,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sending = sending_on(pair.near, torch.ones(LARGE))

    def fail(*arguments: Any, digest: bytes | None) -> None:
        arguments[-1](b"", OSError("cut"))
        sending.on_lost(PeerLost("cut"))

    monkeypatch.setattr(pair.near.payload, "send", fail)
    stream, transfer = await asked(pair)
    stream.send(Grant(transfer))
    with pytest.raises(PeerLost, match="cut"):
        await sending.accepted()
    assert not pair.service.hearers[0].frames


async def test_what_was_accepted_is_neither_sent_nor_told_any_more(
    pair: LinkPair,
) -> None:
    sending = sending_on(pair.near, torch.ones(LARGE, dtype=torch.uint8))
    _, transfer = await asked(pair)
    target, landed = memoryview(bytearray(LARGE)), list[object]()
    pair.far.payload.receive(transfer, 0, target, lambda *end: landed.append(end))
    # Heard in one go: over a link something may be sent in between.
    sending.on_frame(Grant(transfer), b"")
    sending.on_frame(Accepted(), b"")
    assert await sending.accepted()
    await asyncio.gather(*[asyncio.sleep(0) for _ in range(20)])
    assert not landed and not pair.service.hearers[0].frames
    pair.far.payload.stop(transfer)


async def end_while_held(
    pair: LinkPair, sends: RemoteSend | RemoteWriter, call: Awaitable[object], end: str
) -> None:
    """End a call whose tensor a lane is at: it is not over before the lane is."""
    task = asyncio.ensure_future(call)
    with held_lanes("send") as are_held:
        stream, transfer = await asked(pair)
        if isinstance(sends, RemoteWriter):
            transfer = (await pushed(pair)).transfer
        stream.send(Grant(transfer))
        await until(are_held.is_set)
        if end == "accepted":
            sends.on_frame(Accepted(), b"")
        else:
            task.cancel() if end == "cancelled" else pair.near.abort()
        await until_blocked()
        assert not task.done()
    await asyncio.gather(task, return_exceptions=True)


ENDS = pytest.mark.parametrize("end", ["accepted", "cancelled", "lost"])


@ENDS
async def test_an_insert_ends_when_no_lane_reads_its_tensor(end: str) -> None:
    async with linked(answer=lambda *_: None) as pair:
        sending = sending_on(pair.near, ONES)
        await end_while_held(pair, sending, sending.accepted(), end)


@ENDS
async def test_a_put_ends_when_no_lane_reads_its_tensor(end: str) -> None:
    async with linked(answer=lambda *_: None) as pair:
        writer = writer_on(pair.near)
        await end_while_held(pair, writer, writer.put("key", ONES), end)
