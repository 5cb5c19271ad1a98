from __future__ import annotations

import asyncio

import pytest

from asynckv.errors import (
    PeerLost,
)
from asynckv.protocol.frames import (
    Peek,
)
from asynckv.testing.blocked import until
from harness.link_pairs import Hearer, linked

pytestmark = pytest.mark.both_loops

ASK = Peek(has_key=True)


def never(*_: object) -> None:
    """Let the request wait."""


async def test_a_loss_is_told_once_and_never_inside_the_call() -> None:
    async with linked(answer=never) as pair:
        hearer, told = Hearer(), list[PeerLost]()
        pair.near.open_stream(hearer, ASK)
        pair.near.call_when_lost(told.append)
        pair.near.abort()
        assert hearer.losses == told == []
        pair.near.abort()
        await pair.near.aclose()
        assert len(hearer.losses) == len(told) == 1


async def test_who_asks_late_learns_of_the_loss_too() -> None:
    async with linked() as pair:
        pair.near.abort()
        told = list[PeerLost]()
        pair.near.call_when_lost(told.append)
        await until(lambda: bool(told))
        with pytest.raises(PeerLost, match="aborted on this side"):
            pair.near.open_stream(Hearer(), ASK)


async def test_a_stream_closed_after_the_loss_is_not_told_either() -> None:
    async with linked(answer=never) as pair:
        hearer = Hearer()
        stream = pair.near.open_stream(hearer, ASK)
        pair.near.abort()
        stream.close()
        await pair.near.wait_closed()
        await asyncio.sleep(0)
        assert hearer.losses == []


async def test_each_who_hears_of_a_loss_gets_an_error_of_its_own() -> None:
    async with linked(answer=never) as pair:
        one, two = Hearer(), Hearer()
        pair.near.open_stream(one, ASK)
        pair.near.open_stream(two, ASK)
        pair.near.abort()
        assert await one.loss() is not await two.loss()


async def test_one_listener_that_fails_keeps_no_other_from_hearing() -> None:
    def fail(error: PeerLost) -> None:
        raise RuntimeError("on purpose")

    async with linked() as pair:
        told = list[PeerLost]()
        pair.near.call_when_lost(fail)
        pair.near.call_when_lost(told.append)
        pair.near.abort()
        await until(lambda: bool(told))


async def test_what_a_peer_says_in_parting_is_told_in_one_line() -> None:
    async with linked() as pair:
        pair.near._ending.hear_goodbye("done\nCRITICAL root: \x1b[31m")
        assert str(pair.near.error).isprintable()
