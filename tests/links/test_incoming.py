from __future__ import annotations

import pytest

from asynckv.errors import (
    EntryTooLarge,
    PeerLost,
    RemoteProtocolError,
)
from asynckv.links.link import Link
from asynckv.protocol.failures import from_failure
from asynckv.protocol.frames import (
    Failure,
    Frame,
    Peek,
)
from asynckv.testing.link_pairs import Hearer, linked

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
