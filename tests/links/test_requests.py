from __future__ import annotations

import asyncio

from asynckv.protocol.frames import (
    Peek,
)
from asynckv.protocol.transfer_frames import Grant
from asynckv.testing import until
from harness.link_pairs import Hearer, linked


async def test_a_stream_that_was_closed_says_and_hears_nothing() -> None:
    async with linked() as pair:
        hearer = Hearer()
        stream = pair.near.open_stream(hearer, Peek(has_key=True))
        stream.close()
        pair.near.abort()
        stream.send(Grant(1))
        await pair.near.wait_closed()
        assert not hearer.frames and not hearer.losses


async def test_a_service_may_answer_and_forget_within_open() -> None:
    async with linked(answer=lambda stream, *_: stream.close()) as pair:
        hearer = Hearer()
        pair.near.open_stream(hearer, Peek(has_key=True))
        await pair.near.aclose()
        assert (await hearer.loss()).goodbye
        assert pair.service.hearers[0].losses == []


async def test_a_stream_shows_its_number_and_its_link_alone() -> None:
    async with linked() as pair:
        stream = pair.near.open_stream(Hearer(), Peek(has_key=True))
        assert repr(stream) == f"<LinkStream {stream.id} of {pair.near!r}>"


async def test_what_is_sent_at_once_has_left_and_what_follows_goes_together() -> None:
    async with linked(answer=lambda *_: None) as pair:
        stream = pair.near.open_stream(Hearer(), Peek(has_key=True))
        await asyncio.sleep(0)
        stream.send(Grant(1))
        assert pair.near.outgoing_bytes
        stream.send_at_once(Grant(2))
        assert not pair.near.outgoing_bytes
        stream.send_at_once(Grant(3))
        assert pair.near.outgoing_bytes
        await asyncio.sleep(0)
        assert not pair.near.outgoing_bytes


async def test_a_long_body_is_sent_at_once_as_by_send() -> None:
    async with linked(answer=lambda *_: None) as pair:
        stream = pair.near.open_stream(Hearer(), Peek(has_key=True))
        await asyncio.sleep(0)
        body = bytes(range(256)) * 1000
        stream.send_at_once(Grant(1), body)
        stream.send_at_once(Grant(2))
        await until(lambda: bool(pair.service.hearers))
        hearer = pair.service.hearers[0]
        assert [await hearer.next() for _ in range(2)] == [
            (Grant(1), body),
            (Grant(2), b""),
        ]


async def test_nothing_is_sent_at_once_on_a_stream_that_is_over() -> None:
    async with linked(answer=lambda *_: None) as pair:
        stream = pair.near.open_stream(Hearer(), Peek(has_key=True))
        pair.near.abort()
        stream.send_at_once(Grant(1))
        assert not pair.near.outgoing_bytes
