from __future__ import annotations

import pytest

from asynckv.protocol.frames import Peek, Result
from asynckv.tensors.feeds import Feed
from asynckv.testing.blocked import until
from harness.link_pairs import Hearer, landed_bytes, linked, name_of


async def test_a_pair_is_linked_and_the_far_end_echoes() -> None:
    async with linked() as pair:
        hearer = Hearer()
        pair.near.open_stream(hearer, Peek(has_key=True), b"body")
        assert await hearer.next() == (Result(4), b"body")
        assert pair.service.asked[0][1:] == (Peek(has_key=True), b"body")


async def test_a_hearer_learns_of_the_end() -> None:
    async with linked(answer=lambda *_: None) as pair:
        hearer = Hearer()
        pair.near.open_stream(hearer, Peek(has_key=True))
        pair.near.abort()
        assert "aborted on this side" in str(await hearer.loss())
        with pytest.raises(ConnectionError):
            await hearer.next()


async def test_what_has_landed_of_a_part_counts_until_it_is_whole() -> None:
    async with linked() as pair:
        feed, landed = Feed(64), list[object]()
        pair.far.payload.receive(
            *(1, 0, memoryview(bytearray(64))), lambda *end: landed.append(end)
        )
        pair.near.payload.feed(1, 0, feed, lambda *_: None)
        feed.put(memoryview(b"x" * 24))
        await until(lambda: landed_bytes(pair.far) == 24)
        feed.put(memoryview(b"x" * 40))
        await until(lambda: bool(landed))
        assert landed_bytes(pair.far) == 0


def test_names_are_all_different() -> None:
    assert name_of("a").id != name_of("a").id
