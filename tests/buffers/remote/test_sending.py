from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from asynckv.buffers.entries.entries import make_draft
from asynckv.buffers.remote.insert import Sending, begin_insert
from asynckv.errors import PeerLost, RemoteProtocolError
from asynckv.links.link import Link
from asynckv.protocol.frames import (
    Accepted,
    Cancel,
    Failure,
    Insert,
    Result,
)
from asynckv.protocol.transfer_frames import Grant
from asynckv.tensors.views import spec_of
from asynckv.testing.blocked import until, until_blocked
from asynckv.transfers.source import HostSource
from harness.link_pairs import LinkPair, linked

LARGE = 2**20


def sending_on(link: Link, *tensors: torch.Tensor) -> Sending:
    specs = {f"{i}.key": spec_of(tensor) for i, tensor in enumerate(tensors)}
    draft = make_draft(
        [1], None, specs, entry_id="it", fingerprint=None, ttl_s=1, deliveries=1
    )
    return begin_insert(link, draft, [HostSource(tensor) for tensor in tensors])


async def asked(pair: LinkPair) -> None:
    await until(lambda: bool(pair.service.asked))


async def test_a_grant_that_crosses_the_cancellation_sends_nothing() -> None:
    key = torch.ones(LARGE, dtype=torch.uint8)
    async with linked("mem://", lambda *_: None) as pair:
        sending = sending_on(pair.near, key)
        await asked(pair)
        stream, frame, _ = pair.service.asked[0]
        assert isinstance(frame, Insert)
        target, landed = memoryview(bytearray(LARGE)), list[object]()
        pair.far.payload.receive(
            frame.transfer, 0, target, lambda *end: landed.append(end)
        )
        stream.send(Grant(frame.transfer))
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


async def test_what_fails_while_it_is_cancelled_is_silent() -> None:
    async with linked("mem://", lambda *_: None) as pair:
        sending = sending_on(pair.near)
        task = asyncio.create_task(sending.accepted())
        await until_blocked(task)
        sending.on_lost(PeerLost("cut"))
        task.cancel()
        await asyncio.wait({task})
        assert task.cancelled()


async def test_a_cancelled_one_is_withdrawn() -> None:
    async with linked("mem://", lambda *_: None) as pair:
        task = asyncio.create_task(sending_on(pair.near).accepted())
        await asked(pair)
        task.cancel()
        assert await pair.service.hearers[0].next() == (Cancel(), b"")
        await asyncio.wait({task})


async def test_a_lost_link_is_no_error_of_the_request() -> None:
    async with linked("mem://", lambda *_: None) as pair:
        task = asyncio.create_task(sending_on(pair.near).accepted())
        await asked(pair)
        pair.far.abort()
        assert await task is False


async def test_what_a_lane_could_not_send_is_not_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with linked("mem://", lambda *_: None) as pair:
        sending = sending_on(pair.near, torch.ones(LARGE))

        def fail(*arguments: Any, digest: bytes | None) -> None:
            arguments[-1](b"", OSError("cut"))
            sending.on_lost(PeerLost("cut"))

        monkeypatch.setattr(pair.near.payload, "send", fail)
        await asked(pair)
        stream, frame, _ = pair.service.asked[0]
        assert isinstance(frame, Insert)
        stream.send(Grant(frame.transfer))
        with pytest.raises(PeerLost, match="cut"):
            await sending.accepted()
        assert not pair.service.hearers[0].frames


async def test_a_loss_of_something_else_that_the_peer_tells_of_is_raised() -> None:
    lost = Failure("PeerLost", "another peer")
    async with linked("mem://", lambda stream, *_: stream.send(lost)) as pair:
        with pytest.raises(PeerLost, match="another"):
            await sending_on(pair.near).accepted()
        assert pair.near.is_open


async def test_an_answer_that_makes_no_sense_is_raised_and_breaks_the_link() -> None:
    async with linked("mem://", lambda stream, *_: stream.send(Result(1))) as pair:
        with pytest.raises(RemoteProtocolError, match="belongs here"):
            await sending_on(pair.near).accepted()
        assert not pair.near.is_open


async def test_what_was_accepted_is_neither_sent_nor_told_any_more() -> None:
    async with linked("mem://", lambda *_: None) as pair:
        sending = sending_on(pair.near, torch.ones(LARGE, dtype=torch.uint8))
        await asked(pair)
        _, frame, _ = pair.service.asked[0]
        assert isinstance(frame, Insert)
        target, landed = memoryview(bytearray(LARGE)), list[object]()
        pair.far.payload.receive(
            frame.transfer, 0, target, lambda *end: landed.append(end)
        )
        # Heard in one go: over a link something may be sent in between.
        sending.on_frame(Grant(frame.transfer), b"")
        sending.on_frame(Accepted(), b"")
        assert await sending.accepted()
        await asyncio.gather(*[asyncio.sleep(0) for _ in range(20)])
        assert not landed and not pair.service.hearers[0].frames
        pair.far.payload.stop(frame.transfer)
