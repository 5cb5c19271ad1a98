from __future__ import annotations

import pytest

from asynckv.protocol.frames import Peek, Result
from asynckv.testing.link_pairs import Hearer, linked, name_of


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


def test_names_are_all_different() -> None:
    assert name_of("a").id != name_of("a").id
