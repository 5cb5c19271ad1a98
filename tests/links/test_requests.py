from __future__ import annotations

from asynckv.errors import PeerLost
from asynckv.links.requests import LinkStream
from asynckv.protocol.frames import Grant, Peek
from asynckv.testing.link_pairs import Hearer, linked


async def test_a_stream_closed_before_its_handler_came_stays_closed() -> None:
    async with linked() as pair:
        stream, hearer = LinkStream(pair.near, 99), Hearer()
        stream.close()
        stream.attach(hearer)
        stream.on_frame(Grant(1), b"")
        stream.on_lost(PeerLost())
        assert not hearer.frames and not hearer.losses


async def test_a_service_may_answer_and_forget_within_open() -> None:
    async with linked(answer=lambda stream, *_: stream.close()) as pair:
        hearer = Hearer()
        pair.near.open_stream(hearer, Peek(has_key=True))
        await pair.near.aclose()
        assert (await hearer.loss()).goodbye
        assert pair.service.hearers[0].losses == []
