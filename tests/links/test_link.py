from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest

from asynckv.errors import (
    LocalProtocolError,
    RemoteProtocolError,
)
from asynckv.links.link import LinkStream
from asynckv.protocol.frames import (
    Frame,
    OpenPipe,
    Peek,
    Push,
    Result,
)
from asynckv.protocol.transfer_frames import Grant
from asynckv.protocol.values import Limits
from asynckv.testing.blocked import until, until_blocked
from harness.link_pairs import ASK, Hearer, LinkPair, ScriptedService, ask, linked

SCHEMES = ["tcp", "unix", "mem", "mem-inline"]


@pytest.fixture(params=SCHEMES)
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return {
        "tcp": "tcp://127.0.0.1:0",
        "unix": f"unix://{tmp_path}/link.sock",
        "mem": "mem://",
        "mem-inline": "mem://?payload=inline",
    }[request.param]


def never(*_: object) -> None:
    """Let the request wait."""


@pytest.mark.both_loops
@pytest.mark.parametrize("nbytes", [0, 64, 65_536, 65_537, 1_000_000, 16 * 2**20])
async def test_a_request_and_its_body_come_back(url: str, nbytes: int) -> None:
    body = bytes(range(256)) * (nbytes // 256) + bytes(nbytes % 256)
    async with linked(url) as pair:
        assert await ask(pair.near, body) == (Result(nbytes), body)


@pytest.mark.both_loops
async def test_both_ends_can_ask(url: str) -> None:
    async with linked(url, near={"service": _Doubler()}) as pair:
        assert await ask(pair.far, b"ab") == (Result(4), b"abab")
        assert await ask(pair.near, b"ab") == (Result(2), b"ab")


class _Doubler:
    def open(self, stream: LinkStream, frame: Frame, body: bytes) -> Hearer:
        stream.send(Result(2 * len(body)), body * 2)
        return Hearer()


@pytest.mark.both_loops
async def test_a_thousand_requests_share_a_link(url: str) -> None:
    async with linked(url) as pair:
        answers = await asyncio.gather(
            *(ask(pair.near, str(number).encode() * 50) for number in range(1000))
        )
    bodies = [body for _, body in answers]
    assert bodies == [str(number).encode() * 50 for number in range(1000)]


@pytest.mark.both_loops
async def test_a_blocked_request_delays_no_other(url: str) -> None:
    def answer(stream: LinkStream, frame: object, body: bytes) -> None:
        if body != b"wait":
            stream.send(Result(1))

    async with linked(url, answer) as pair:
        blocked = asyncio.create_task(ask(pair.near, b"wait"))
        await until_blocked(blocked)
        for _ in range(100):
            await ask(pair.near)
        assert not blocked.done()
        pair.service.asked[0][0].send(Result(7))
        assert await blocked == (Result(7), b"")


@pytest.mark.both_loops
async def test_a_small_request_passes_a_large_one(url: str) -> None:
    async with linked(url) as pair:
        large = asyncio.create_task(ask(pair.near, bytes(16 * 2**20)))
        await asyncio.sleep(0)
        await ask(pair.near, b"small")
        assert not large.done()
        await large


@pytest.mark.both_loops
async def test_frames_of_a_stream_keep_their_order_both_ways(url: str) -> None:
    sizes = [0, 100_000, 3, 70_000, 200_000, 1]
    async with linked(url, never) as pair:
        hearer = Hearer()
        stream = pair.near.open_stream(hearer, OpenPipe())
        await until(lambda: len(pair.service.hearers) == 1)
        for number, size in enumerate(sizes):
            stream.send(Push(number, 0, inline=True), bytes(size))
            pair.service.asked[0][0].send(Push(number, 0, inline=True), bytes(size))
        for end in (hearer, pair.service.hearers[0]):
            got = [await end.next() for _ in sizes]
            assert [len(body) for _, body in got] == sizes


@pytest.mark.both_loops
async def test_transfers_have_numbers_of_their_own() -> None:
    async with linked() as pair:
        numbers = [pair.near.new_transfer() for _ in range(3)]
        assert sorted(set(numbers)) == numbers


@pytest.mark.both_loops
async def test_what_is_too_long_is_our_own_error_and_hurts_nobody() -> None:
    limits = Limits(max_body_bytes=70_000)
    async with linked(near={"limits": limits}) as pair:
        assert pair.far.limits == pair.near.limits == limits
        with pytest.raises(LocalProtocolError):
            pair.near.open_stream(Hearer(), ASK, bytes(70_001))
        assert (await ask(pair.near, bytes(70_000)))[0] == Result(70_000)


@pytest.mark.both_loops
async def test_a_body_may_be_overwritten_once_it_is_sent() -> None:
    async with linked() as pair:
        hearer, body = Hearer(), bytearray(b"a" * 300_000)
        pair.near.open_stream(hearer, ASK, body)
        body[:] = b"b" * 300_000
        assert (await hearer.next())[1] == b"a" * 300_000


# The end of a link.


@pytest.mark.both_loops
async def test_closing_says_goodbye_to_both_ends(url: str) -> None:
    async with linked(url, never) as pair:
        ours, theirs = Hearer(), Hearer()
        pair.near.open_stream(ours, ASK)
        pair.far.open_stream(theirs, OpenPipe())
        await pair.near.aclose()
        await pair.far.wait_closed()
        near_loss, far_loss = await ours.loss(), await theirs.loss()
    assert near_loss.goodbye and far_loss.goodbye
    assert "closed on this side" in str(near_loss)
    assert "said goodbye" in str(far_loss)


@pytest.mark.both_loops
async def test_what_was_queued_leaves_before_the_goodbye(url: str) -> None:
    async with linked(url, never) as pair:
        for _ in range(3):
            pair.near.open_stream(Hearer(), ASK, bytes(1_000_000))
        await pair.near.aclose()
        await pair.far.wait_closed()
        assert [len(body) for _, _, body in pair.service.asked] == [1_000_000] * 3


@pytest.mark.both_loops
async def test_aborting_says_nothing(url: str) -> None:
    async with linked(url, never) as pair:
        hearer = Hearer()
        pair.near.open_stream(hearer, ASK)
        await until(lambda: len(pair.service.hearers) == 1)
        pair.near.abort()
        assert not pair.near.is_open
        loss = await pair.service.hearers[0].loss()
        assert not loss.goodbye and not (await hearer.loss()).goodbye
        assert "without a goodbye" in str(loss)


@pytest.mark.both_loops
async def test_a_closed_stream_hears_of_nothing() -> None:
    async with linked(answer=never) as pair:
        hearer = Hearer()
        stream = pair.near.open_stream(hearer, ASK)
        await until(lambda: len(pair.service.asked) == 1)
        stream.close()
        pair.service.asked[0][0].send(Result(1))
        await pair.near.aclose()
        assert hearer.frames == [] and hearer.losses == []


@pytest.mark.both_loops
@pytest.mark.parametrize("send", [LinkStream.send, LinkStream.send_at_once])
async def test_sending_after_the_end_does_nothing(
    send: Callable[[LinkStream, Grant, bytes], None],
) -> None:
    async with linked(answer=never) as pair:
        stream = pair.near.open_stream(Hearer(), ASK)
        pair.near.abort()
        send(stream, Grant(1), bytes(100))
        assert pair.near.outgoing_bytes == 0


# Broken rules.


class _Strict(Hearer):
    def on_frame(self, frame: Frame, body: bytes) -> None:
        raise RemoteProtocolError("that makes no sense here")


@pytest.mark.both_loops
async def test_a_broken_rule_ends_that_link_and_tells_why(url: str) -> None:
    async with linked(url) as pair, linked(url.replace("link", "other")) as other:
        pair.near.open_stream(_Strict(), ASK)
        await pair.near.wait_closed()
        await pair.far.wait_closed()
        assert "makes no sense" in str(pair.near.error)
        assert "closed the link: that makes no sense" in str(pair.far.error)
        assert await ask(other.near, b"fine") == (Result(4), b"fine")


@pytest.mark.both_loops
async def test_the_payload_transport_that_breaks_takes_the_link_along() -> None:
    async with linked() as pair:
        pair.near.abort(ChildProcessError("lane 1"))
        assert "lane 1" in str(pair.near.error)


# Closing, cancelled and repeated.


@pytest.mark.both_loops
async def test_closing_twice_and_after_an_abort_is_fine(url: str) -> None:
    async with linked(url) as pair:
        await pair.near.aclose()
        await pair.near.aclose()
        pair.far.abort()
        await pair.far.aclose()


@pytest.mark.both_loops
async def test_closing_from_two_tasks_is_fine() -> None:
    async with linked() as pair:
        await asyncio.gather(pair.near.aclose(), pair.near.aclose(), pair.far.aclose())


async def _stuck(pair: LinkPair) -> asyncio.Task[None]:
    """A close that waits for a peer which does not hang up."""
    pair.far._stream.pause_reading()
    closing = asyncio.create_task(pair.near.aclose())
    await until_blocked(closing)
    return closing


@pytest.mark.both_loops
async def test_a_close_is_bounded_though_the_peer_never_hangs_up() -> None:
    async with linked() as pair:
        async with asyncio.timeout(3):
            await (await _stuck(pair))


@pytest.mark.both_loops
async def test_a_cancelled_close_aborts() -> None:
    async with linked() as pair:
        closing = await _stuck(pair)
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        await asyncio.wait_for(pair.near.wait_closed(), 1)


@pytest.mark.both_loops
async def test_a_close_in_a_cancelled_scope_still_says_goodbye() -> None:
    async with linked() as pair:
        with anyio.CancelScope() as scope:
            scope.cancel()
            await pair.near.aclose()
        await pair.far.wait_closed()
        assert pair.far.error is not None and pair.far.error.goodbye


# Heartbeats and peers that do not read.


@pytest.mark.both_loops
async def test_a_silent_peer_is_found_dead() -> None:
    limits = Limits(heartbeat_ms=20)
    async with linked(answer=never, near={"limits": limits}) as pair:
        hearer = Hearer()
        pair.near.open_stream(hearer, ASK)
        pair.far._heartbeat.stop()
        pair.far._stream.pause_reading()
        loss = await hearer.loss()
    assert "was silent for 3 heartbeats of 0.02 s" in str(loss)


@pytest.mark.both_loops
async def test_an_idle_link_lives_on_its_heartbeats(url: str) -> None:
    async with linked(url, near={"limits": Limits(heartbeat_ms=10)}) as pair:
        pings = pair.near._pings
        await until(lambda: int(repr(pings)[6:-1]) > 8)
        assert pair.near.is_open and pair.far.is_open


def _flood(stream: LinkStream, frame: Any, body: bytes) -> None:
    stream.send(Result(len(body)), bytes(60_000))


@pytest.mark.both_loops
async def test_a_peer_that_never_reads_cannot_make_us_hold_memory() -> None:
    limits = Limits(heartbeat_ms=30)
    async with linked(answer=_flood, near={"limits": limits}) as pair:
        pair.near._stream.pause_reading()
        most, left = 0, 20_000  # as many answers of 60 kB: more than ever fits
        while pair.far.is_open:
            if pair.near.outgoing_bytes == 0 and pair.near.is_open:
                pair.near._heartbeat.has_received = True
                for _ in range(min(100, left)):
                    pair.near.open_stream(Hearer(), ASK)
                    left -= 1
            most = max(most, pair.far.outgoing_bytes)
            await asyncio.sleep(0)
        assert "does not read" in str(pair.far.error)
        assert most < 20 * 2**20


@pytest.mark.both_loops
async def test_two_that_answer_each_other_never_wait_for_ever() -> None:
    limits = Limits(heartbeat_ms=100)
    service = ScriptedService()
    async with linked(near={"limits": limits, "service": service}) as pair:
        body = bytes(60_000)
        ours = [ask(pair.near, body) for _ in range(150)]
        theirs = [ask(pair.far, body) for _ in range(150)]
        async with asyncio.timeout(20):
            answers = await asyncio.gather(*ours, *theirs)
        assert len(answers) == 300


@pytest.mark.parametrize("ends", [False, True])
async def test_who_waits_for_room_is_told_when_it_has_drained_or_ended(
    ends: bool,
) -> None:
    async with linked(answer=never) as pair:
        told = list[int]()
        pair.near.open_stream(Hearer(), ASK, bytes(16 * 2**20))
        pair.near.call_when_drained(lambda: told.append(pair.near.outgoing_bytes))
        assert pair.near.outgoing_bytes > 2**20
        if ends:
            pair.near.abort()
        await until(lambda: bool(told))
        assert told[0] < 2**20


@pytest.mark.both_loops
async def test_an_answer_of_what_has_ended_leaves_at_once_and_others_together() -> None:
    async with linked(answer=lambda *_: None) as pair:
        for _ in range(3):
            pair.near.open_stream(Hearer(), Peek(has_key=True))
        await until(lambda: len(pair.service.asked) == 3)
        await asyncio.sleep(0)
        first, *others = (stream for stream, *_ in pair.service.asked)
        first.send(Result(1))
        assert not pair.far.outgoing_bytes
        for stream in others:
            stream.send(Result(1))
        assert pair.far.outgoing_bytes
        await asyncio.sleep(0)
        assert not pair.far.outgoing_bytes


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
