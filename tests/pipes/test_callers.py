from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import NamedTuple

import pytest

from asynckv.errors import PeerLost
from asynckv.links.link import LinkStream
from asynckv.links.streams import StreamHandler
from asynckv.pipes import joining
from asynckv.pipes.joining import Callers
from asynckv.protocol.frames import Failure, OpeningFrame, OpenPipe
from asynckv.testing.blocked import until, until_blocked
from harness.link_pairs import Hearer, LinkPair, ScriptedService, linked

LOST = PeerLost("rank 2 is lost")


class Asked(ScriptedService):
    """Hands each pipe that is opened to ``callers``."""

    def __init__(self) -> None:
        super().__init__()
        self.callers = Callers(2**20, has_gpu=False)

    def open(  # type: ignore[override]
        self, stream: LinkStream, frame: OpeningFrame, body: bytes
    ) -> StreamHandler:
        assert isinstance(frame, OpenPipe)
        return self.callers.arrived(stream, frame)


class Calling(NamedTuple):
    pair: LinkPair
    callers: Callers

    def call(self, name: str) -> Hearer:
        hearer = Hearer()
        self.pair.near.open_stream(hearer, OpenPipe(name))
        return hearer


@pytest.fixture
async def calling() -> AsyncIterator[Calling]:
    service = Asked()
    async with linked(service=service) as pair:
        yield Calling(pair, service.callers)
        service.callers.abort()


async def test_who_has_called_is_taken_once_by_name(calling: Calling) -> None:
    calling.call("group/1")
    end = await calling.callers.taken("group/1")
    assert end.link is calling.pair.far and calling.callers.of(end.link) is None
    end.abort()


async def test_who_has_not_called_yet_is_waited_for(calling: Calling) -> None:
    waiting = asyncio.create_task(calling.callers.taken("group/1"))
    calling.call("group/2")
    await until(lambda: calling.callers.of(calling.pair.far) is not None)
    await until_blocked(waiting)
    calling.call("group/1")
    (await waiting).abort()


async def test_a_cancelled_call_takes_nobody(calling: Calling) -> None:
    waiting = asyncio.create_task(calling.callers.taken("group/1"))
    await until_blocked(waiting)
    calling.call("group/1")
    waiting.cancel()
    await asyncio.wait({waiting})
    (await calling.callers.taken("group/1")).abort()


async def test_when_the_group_has_ended_nobody_is_waited_for(calling: Calling) -> None:
    waiting = asyncio.create_task(calling.callers.taken("group/1"))
    await until_blocked(waiting)
    calling.callers.fail(LOST)
    with pytest.raises(PeerLost, match="rank 2"):
        await waiting
    calling.callers.hope_again()
    calling.call("group/1")
    (await calling.callers.taken("group/1")).abort()


@pytest.mark.parametrize("most", [1, 1024])
async def test_a_second_pipe_of_a_rank_and_one_too_many_are_refused(
    monkeypatch: pytest.MonkeyPatch, calling: Calling, most: int
) -> None:
    monkeypatch.setattr(joining, "_MAX_CALLERS", most)
    calling.call("group/1")
    frame, _ = await calling.call("group/1" if most > 1 else "group/2").next()
    assert isinstance(frame, Failure) and "already" in frame.message


async def test_who_was_not_taken_is_hung_up_on(calling: Calling) -> None:
    calling.call("group/1")
    await until(lambda: calling.callers.of(calling.pair.far) is not None)
    calling.callers.abort()
    await until(lambda: not calling.pair.near.is_open)
