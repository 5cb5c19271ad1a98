from __future__ import annotations

import asyncio

import pytest

from asynckv.errors import (
    EntryTooLarge,
    PeerLost,
    RemoteProtocolError,
)
from asynckv.links.link import Link, LinkStream
from asynckv.protocol.failures import from_failure
from asynckv.protocol.frames import (
    Cancel,
    Cancelled,
    Failure,
    Frame,
    OpeningFrame,
    Peek,
    Result,
)
from asynckv.protocol.values import Limits
from harness.link_pairs import Hearer, ScriptedService, linked

pytestmark = pytest.mark.both_loops

ASK = Peek(has_key=True)


async def ask(link: Link, body: bytes = b"") -> tuple[Frame, bytes]:
    hearer = Hearer()
    link.open_stream(hearer, ASK, body)
    return await hearer.next()


class _Faulty(Hearer):
    def on_frame(self, frame: Frame, body: bytes) -> None:
        raise ZeroDivisionError("on purpose")


async def test_an_error_of_the_service_is_the_answer() -> None:
    def answer(*_: object) -> None:
        raise EntryTooLarge(nbytes=5, max_bytes=3)

    async with linked(answer=answer) as pair:
        frame, _ = await ask(pair.near)
        assert isinstance(frame, Failure)
        assert isinstance(from_failure(frame), EntryTooLarge)
        assert pair.near.is_open


async def test_a_side_without_a_service_says_so() -> None:
    async with linked() as pair:
        frame, _ = await ask(pair.far)
        assert isinstance(frame, Failure)
        assert frame.code == "WrongRole"


async def test_a_fault_of_a_handler_is_logged_and_aborts_the_link(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with linked() as pair:
        pair.near.open_stream(_Faulty(), ASK)
        await pair.near.wait_closed()
        assert isinstance(pair.near.error, PeerLost)
        assert isinstance(pair.near.error.__cause__, ZeroDivisionError)
    assert "on purpose" in caplog.text


class _Strict(Hearer):
    def on_frame(self, frame: Frame, body: bytes) -> None:
        raise RemoteProtocolError("not like that")


@pytest.mark.parametrize("kind", [_Faulty, _Strict])
async def test_who_is_broken_by_its_own_last_frame_is_told_of_the_end(
    kind: type[Hearer],
) -> None:
    hearer = kind()
    async with linked() as pair:  # which answers by one last frame
        pair.near.open_stream(hearer, ASK)
        assert isinstance(await hearer.loss(), PeerLost)
    assert len(hearer.losses) == 1


async def test_a_fault_of_the_service_aborts_the_link() -> None:
    def answer(*_: object) -> None:
        raise ZeroDivisionError("on purpose")

    async with linked(answer=answer) as pair:
        with pytest.raises(PeerLost):
            await ask(pair.near)
        assert isinstance(pair.far.error, PeerLost)


async def test_a_service_that_sees_a_broken_rule_breaks_the_link() -> None:
    def answer(*_: object) -> None:
        raise RemoteProtocolError("no such contents")

    async with linked(answer=answer) as pair:
        with pytest.raises(PeerLost, match="no such contents"):
            await ask(pair.near)


async def test_the_first_answer_leaves_before_others_are_made() -> None:
    waiting: list[bool] = []

    def answer(stream: LinkStream, *_: object) -> None:
        waiting.append(stream.link.outgoing_bytes > 0)
        stream.send(Result(1))

    async with linked(answer=answer) as pair:
        hearers = [Hearer() for _ in range(4)]
        for hearer in hearers:
            pair.near.open_stream(hearer, ASK)
        for hearer in hearers:
            await hearer.next()
    # The last three come together, with the first or behind it.
    assert [waiting[0], waiting[1], waiting[3]] == [False, False, True]


class _Cancelling(ScriptedService):
    """Answers each cancellation at once, and nothing else."""

    def __init__(self) -> None:
        super().__init__(lambda *_: None)

    def open(self, stream: LinkStream, frame: OpeningFrame, body: bytes) -> Hearer:
        hearer = super().open(stream, frame, body)
        hearer.on_frame = lambda *_: stream.send(Cancelled())  # type: ignore[method-assign]
        return hearer


async def flood(link: Link, count: int, *, cancel: bool) -> None:
    """Ask and take it back, as fast as that goes."""
    for number in range(count):
        hearer = Hearer()
        stream = link.open_stream(hearer, ASK)
        if cancel:
            stream.send(Cancel())
        if number % 10 == 9:
            await hearer.next()


@pytest.mark.parametrize("what", ["requests", "cancelled requests"])
async def test_a_flood_ends_the_link_and_says_why(what: str) -> None:
    rates = {"max_requests_per_s": 50, "max_cancels_per_s": 10_000}
    if what == "cancelled requests":
        rates = {"max_requests_per_s": 10_000, "max_cancels_per_s": 50}
    far = {"limits": Limits(max_streams=20, **rates)}
    async with linked(far=far, service=_Cancelling()) as pair:
        with pytest.raises(PeerLost, match=f"a flood of {what}"):
            await flood(pair.near, 5000, cancel=True)
        assert "flood" in str(pair.far.error)


async def test_a_flood_of_pings_ends_the_link_too() -> None:
    async with linked() as pair:
        for nonce in range(5000):
            pair.near._session.ping(nonce)
        pair.near._outgoing.flush()
        await pair.near.wait_closed()
        assert "a flood of pings" in str(pair.near.error)


async def test_taking_back_all_that_is_open_is_no_flood() -> None:
    limits = Limits(max_streams=2000, max_requests_per_s=10, max_cancels_per_s=10)
    async with linked(far={"limits": limits}, service=_Cancelling()) as pair:
        await flood(pair.near, 1500, cancel=True)
        assert pair.far.is_open


async def test_asking_less_than_one_may_is_no_flood_in_the_long_run() -> None:
    limits = Limits(max_streams=20, max_requests_per_s=1000, max_cancels_per_s=1000)
    async with linked(far={"limits": limits}, service=_Cancelling()) as pair:
        await flood(pair.near, 500, cancel=True)
        assert pair.far.is_open


async def test_what_comes_behind_the_goodbye_is_not_asked() -> None:
    async with linked() as pair:
        closing = asyncio.create_task(pair.far.aclose())
        await asyncio.sleep(0)  # the goodbye has left, and nobody has heard it
        pair.near.open_stream(Hearer(), ASK)
        await closing
        assert not pair.service.asked


async def test_the_defaults_are_beyond_what_one_side_can_ask() -> None:
    async with linked() as pair:
        await flood(pair.near, 5000, cancel=False)
        assert pair.far.is_open
