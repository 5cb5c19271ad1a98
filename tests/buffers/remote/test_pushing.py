from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
import torch

from asynckv.buffers.entries.entries import make_draft
from asynckv.buffers.lookup import LookupBuffer
from asynckv.buffers.remote.insert import RemoteWriter
from asynckv.errors import EntryAborted, PeerLost
from asynckv.links.link import Link
from asynckv.protocol.frames import (
    Accepted,
    Cancelled,
    Push,
)
from asynckv.protocol.transfer_frames import Grant
from asynckv.testing.blocked import until, until_blocked
from asynckv.testing.cancellation import CancelMode, Outcome, sweep_cancellation
from asynckv.testing.pairs import Peers
from asynckv.types import TensorSpec
from harness.link_pairs import linked
from harness.no_routes import NoRoutes

MIB = 2**20
SPECS = {"key": TensorSpec((MIB,), "uint8")}
ONES = torch.ones(MIB, dtype=torch.uint8)


async def test_a_cancelled_put_may_be_made_again_with_other_bytes(
    peers: Peers, local: LookupBuffer
) -> None:
    async with peers.producer.lookup.open_insert([1], None, SPECS) as writer:
        wrong = torch.zeros(MIB, dtype=torch.uint8)
        is_put = False

        async def check(k: int, mode: CancelMode, outcome: Outcome[None]) -> None:
            nonlocal is_put
            wrong.fill_(9)
            is_put = not outcome.cancelled

        await sweep_cancellation(
            lambda: _put_or_stop(writer, wrong, is_put), check, modes=("task",)
        )
    entry = await peers.consumer.lookup.drop_select([1])
    assert not entry.key.any()  # type: ignore[union-attr]


async def _put_or_stop(writer: object, tensor: torch.Tensor, is_put: bool) -> None:
    if not is_put:
        tensor.zero_()
        await writer.put("key", tensor)  # type: ignore[attr-defined]


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


async def test_a_writer_that_was_left_puts_nothing(peers: Peers) -> None:
    async with peers.producer.lookup.open_insert([1], None, SPECS) as writer:
        await writer.put("key", ONES)
    with pytest.raises(RuntimeError, match="left already"):
        await writer.put("key", ONES)


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
async def test_what_is_granted_when_it_is_over_is_ignored(later: int) -> None:
    async with linked("mem://", lambda *_: None) as pair:
        writer = writer_on(pair.near)
        put = asyncio.create_task(writer.put("key", ONES))
        await until(lambda: bool(pair.service.hearers))
        push, _ = await pair.service.hearers[0].next()
        assert isinstance(push, Push)
        put.cancel()
        await asyncio.wait({put})
        stream = pair.service.asked[0][0]
        stream.send(Grant(push.transfer + later))
        stream.send(Accepted())
        if later:
            await until(lambda: not pair.near.is_open)
            assert "never offered" in str(pair.near.error)
        else:
            await writer.granted()
            assert pair.near.is_open


async def test_a_put_that_nobody_needs_any_more_sends_nothing() -> None:
    async with linked("mem://", lambda *_: None) as pair:
        put = asyncio.create_task(writer_on(pair.near).put("key", ONES))
        await until(lambda: bool(pair.service.hearers))
        await pair.service.hearers[0].next()
        pair.service.asked[0][0].send(Accepted())
        await put
        assert len(pair.service.hearers[0].frames) == 1


async def test_a_put_that_nobody_needs_while_it_is_sent_returns_quiet() -> None:
    async with linked("mem://", lambda *_: None) as pair:
        value = ONES.clone()
        put = asyncio.create_task(writer_on(pair.near).put("key", value))
        await until(lambda: bool(pair.service.hearers))
        push, _ = await pair.service.hearers[0].next()
        assert isinstance(push, Push)
        stream = pair.service.asked[0][0]
        stream.send(Grant(push.transfer))
        stream.send(Accepted())  # the far side has not received it yet
        await put
        target, landed = memoryview(bytearray(MIB)), list[object]()
        pair.far.payload.receive(
            push.transfer, 0, target, lambda *end: landed.append(end)
        )
        await asyncio.gather(*[asyncio.sleep(0) for _ in range(20)])
        assert not landed and not any(target[:100])
        assert len(pair.service.hearers[0].frames) == 1


async def test_a_put_that_nobody_needs_when_it_may_be_sent_sends_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with linked("mem://", lambda *_: None) as pair:
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
        await until(lambda: bool(pair.service.hearers))
        push, _ = await pair.service.hearers[0].next()
        assert isinstance(push, Push)
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
        put = asyncio.create_task(writer.put("key", ONES[:10]))
        await until_blocked(put)
        assert not put.done() and len(waiting) == 1
        monkeypatch.undo()
        waiting[0]()  # type: ignore[operator]
        await put
