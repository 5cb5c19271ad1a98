from __future__ import annotations

import asyncio
import dataclasses
import itertools

import pytest

from asynckv.buffers.remote.connection import Backoff, ask
from asynckv.buffers.remote.peer import connect
from asynckv.errors import AsyncKVError, PeerLost, RemoteProtocolError
from asynckv.links.link import LinkStream
from asynckv.links.listen import listen
from asynckv.protocol.frames import (
    Accepted,
    Cancel,
    Cancelled,
    Failure,
    Frame,
    OpeningFrame,
    Peek,
    Result,
    Retract,
)
from asynckv.testing.blocked import until, until_blocked
from harness.link_pairs import Answer, ScriptedService, name_of


@dataclasses.dataclass
class Scripted:
    """A server that answers as it is told."""

    answer: Answer

    async def __aenter__(self) -> ScriptedService:
        self.service = ScriptedService(self.answer)
        self.listener = await listen(
            "mem://", identity=name_of("far"), service_for=lambda _: self.service
        )
        return self.service

    async def __aexit__(self, *exc_info: object) -> None:
        await self.listener.aclose()

    @property
    def url(self) -> str:
        return self.listener.url


def saying(*frames: Frame) -> Answer:
    def answer(stream: LinkStream, frame: OpeningFrame, body: bytes) -> None:
        for one in frames:
            stream.send(one)

    return answer


def recorded_pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    pauses: list[float] = []

    def next_pause_s(backoff: Backoff) -> float:
        pauses.append(next_s(backoff))
        return 0

    next_s = Backoff.next_pause_s
    monkeypatch.setattr(Backoff, "next_pause_s", next_pause_s)
    return pauses


async def test_the_answer_is_returned() -> None:
    script = Scripted(saying(Result(7)))
    async with script as service, connect(script.url) as peer:
        assert await ask(peer, Peek(has_key=True), b"8 bytes.") == Result(7)
        assert service.asked[0][1:] == (Peek(has_key=True), b"8 bytes.")


@pytest.mark.parametrize(
    ("last", "kind"),
    [
        (Failure("KeyError", "who?"), KeyError),
        (Failure("PeerLost", "another peer"), PeerLost),
        (Cancelled(), AsyncKVError),
    ],
)
async def test_a_failure_is_raised_and_not_asked_again(
    last: Frame, kind: type[Exception]
) -> None:
    script = Scripted(saying(last))
    async with script as service, connect(script.url) as peer:
        with pytest.raises(kind):
            await ask(peer, Peek(has_key=False))
        assert len(service.asked) == 1 and peer.is_connected


async def test_a_peer_that_does_not_answer_in_time_is_told_so() -> None:
    script = Scripted(saying())
    async with script as service, connect(script.url) as peer:
        with pytest.raises(TimeoutError):
            await ask(peer, Peek(has_key=False), deadline_s=0.01)
        hearer = service.hearers[0]
        await until(lambda: bool(hearer.frames))
        assert hearer.frames == [(Cancel(), b"")]


async def test_a_cancelled_question_is_withdrawn() -> None:
    script = Scripted(saying())
    async with script as service, connect(script.url) as peer:
        task = asyncio.create_task(ask(peer, Peek(has_key=False)))
        await until_blocked(task)
        task.cancel()
        await until(lambda: service.hearers[0].frames == [(Cancel(), b"")])
        assert task.cancelled()


async def test_it_is_asked_again_after_a_reconnect() -> None:
    script = Scripted(saying())
    async with script as service, connect(script.url) as peer:
        task = asyncio.create_task(ask(peer, Peek(has_key=False)))
        await until(lambda: len(service.asked) == 1)
        service.answer = saying(Result(3))
        service.asked[0][0].link.abort()
        assert await task == Result(3)


def hang_up(stream: LinkStream, frame: OpeningFrame, body: bytes) -> None:
    stream.link.abort()


async def test_its_deadline_counts_from_the_call_however_often_the_link_is_cut() -> (
    None
):
    script = Scripted(hang_up)
    async with script as service, connect(script.url, reconnect_s=0.2) as peer:
        with pytest.raises(TimeoutError):
            await ask(peer, Peek(has_key=False), deadline_s=0.01)
        assert len(service.asked) > 1


def hang_up_first(times: int) -> Answer:
    left = itertools.count(1)

    def answer(stream: LinkStream, frame: OpeningFrame, body: bytes) -> None:
        if next(left) <= times:
            stream.link.abort()
        else:
            stream.send(Result(3))

    return answer


async def test_links_that_answer_nothing_are_made_more_and_more_seldom(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pauses = recorded_pauses(monkeypatch)
    script = Scripted(hang_up_first(7))
    async with script, connect(script.url) as peer:
        assert await ask(peer, Peek(has_key=False)) == Result(3)
        assert len(pauses) == 7  # one before each link but the first
        assert pauses[0] == 0 and pauses[6] >= 0.5
        (await peer.link()).abort()
        assert await ask(peer, Peek(has_key=False)) == Result(3)
        assert pauses[7:] == [0]  # that link had answered


@pytest.mark.parametrize("wrong", [Retract(1), Accepted()])
async def test_an_answer_of_another_kind_breaks_the_link(wrong: Frame) -> None:
    script = Scripted(saying(wrong))
    async with script, connect(script.url, reconnect_s=0) as peer:
        with pytest.raises(RemoteProtocolError, match="belongs here"):
            await ask(peer, Peek(has_key=False))
        await until(lambda: not peer.is_connected)
