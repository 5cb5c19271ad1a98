from __future__ import annotations

import asyncio

import pytest

from asynckv.errors import (
    EntryTooLarge,
    PeerLost,
    RemoteProtocolError,
)
from asynckv.links import reader as incoming
from asynckv.links.dial import dial
from asynckv.links.link import Link, LinkStream
from asynckv.links.listen import listen
from asynckv.links.reader import AT_ONCE, Turns
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
from asynckv.testing.blocked import until
from harness.link_pairs import (
    ASK,
    Hearer,
    LinkPair,
    ScriptedService,
    ask,
    linked,
    name_of,
)

pytestmark = pytest.mark.both_loops


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


@pytest.mark.parametrize(
    ("max_streams", "max_per_s", "count"),
    [(2000, 10, 1500), (20, 1000, 500)],
    ids=["all that is open", "less than one may in the long run"],
)
async def test_what_one_may_take_back_is_no_flood(
    max_streams: int, max_per_s: int, count: int
) -> None:
    limits = Limits(
        max_streams=max_streams,
        max_requests_per_s=max_per_s,
        max_cancels_per_s=max_per_s,
    )
    async with linked(far={"limits": limits}, service=_Cancelling()) as pair:
        await flood(pair.near, count, cancel=True)
        assert pair.far.is_open


async def test_who_hangs_up_within_a_body_has_cut_a_frame() -> None:
    async with linked() as pair:
        pair.near.open_stream(Hearer(), ASK, bytes(2**23))
        pair.near.abort()
        await until(lambda: not pair.far.is_open)
        assert "in the middle of a frame" in str(pair.far.error)


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


class Clock:
    """Stands for the module ``time``: it goes on when it is told to."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(incoming, "time", clock)
    return clock


class Ticks:
    """Counts those of the loop, until its test is over."""

    def __init__(self) -> None:
        self.count = 0
        self._loop = asyncio.get_running_loop()
        self._next()

    def _next(self) -> None:
        self.count += 1
        self._loop.call_soon(self._next)


class Talker:
    """Has so many frames to say, and waits again while there are more."""

    def __init__(self, turns: Turns, left: int, heard: list[str], name: str) -> None:
        self._turns = turns
        self._received = heard
        self._name = name
        self._number = turns.new_number()
        self.left = left
        self.done = asyncio.Event()
        self.largest = 0
        turns.wait(self._number, self)

    def go_on(self, max_count: int, until_s: float) -> int:
        count = min(self.left, max_count)
        self.left -= count
        self.largest = max(self.largest, count)
        self._received.append(self._name)
        if self.left:
            self._turns.wait(self._number, self)
        else:
            self.done.set()
        return count


async def test_who_has_much_to_say_takes_turns_with_others() -> None:
    turns, heard = Turns(asyncio.get_running_loop()), list[str]()
    talkers = [Talker(turns, 3 * AT_ONCE, heard, name) for name in "abc"]
    for talker in talkers:
        await talker.done.wait()
    assert "".join(heard).startswith("abcabc")
    assert {talker.largest for talker in talkers} == {AT_ONCE}


async def test_the_line_begins_anew_after_its_end() -> None:
    turns, heard = Turns(asyncio.get_running_loop()), list[str]()
    for name in "ab":
        await Talker(turns, 1, heard, name).done.wait()
    assert heard == ["a", "b"]


async def test_beside_one_who_says_little_a_turn_is_short() -> None:
    turns = Turns(asyncio.get_running_loop())
    turns.note_received(turns.new_number())
    assert turns.is_shared
    talker = Talker(turns, AT_ONCE, [], "a")
    await talker.done.wait()
    assert talker.largest < AT_ONCE


async def test_who_has_much_to_say_is_not_beside_itself() -> None:
    turns = Turns(asyncio.get_running_loop())
    other = turns.new_number()
    assert not turns.is_shared
    turns.note_received(other + 1)
    Talker(turns, 1, [], "a")
    assert not turns.is_shared
    turns.note_received(other)
    turns.note_received(other + 2)
    Talker(turns, 1, [], "b")
    assert turns.is_shared


async def test_who_takes_long_is_alone_in_its_tick(clock: Clock) -> None:
    turns, ticks, heard = Turns(asyncio.get_running_loop()), Ticks(), list[int]()

    class Slow(Talker):
        def go_on(self, max_count: int, until_s: float) -> int:
            heard.append(ticks.count)
            clock.now_s = until_s
            return super().go_on(max_count, until_s)

    talkers = [Slow(turns, 1, [], name) for name in "abc"]
    for talker in talkers:
        await talker.done.wait()
    assert len({*heard}) == 3


async def ask_at_once(pair: LinkPair, count: int) -> None:
    """Ask so often in one tick, and wait for the answers."""
    hearers = [Hearer() for _ in range(count)]
    for hearer in hearers:
        pair.near.open_stream(hearer, Peek(has_key=True), b"12345678")
    for hearer in hearers:
        assert await hearer.next() == (Result(8), b"12345678")


async def test_what_takes_long_lets_others_run_after_a_millisecond(
    clock: Clock,
) -> None:
    ticks, heard = Ticks(), list[int]()

    def answer(stream: LinkStream, frame: object, body: bytes) -> None:
        heard.append(ticks.count)
        clock.now_s += 0.0003
        stream.send(Result(8), body)

    async with linked(answer=answer) as pair:
        await ask_at_once(pair, 20)
    # Three at a time; a tick may have time for what comes next, too.
    assert max(heard.count(tick) for tick in heard) <= 6


async def test_what_takes_no_time_is_heard_in_one_tick(clock: Clock) -> None:
    ticks, heard = Ticks(), list[int]()

    def answer(stream: LinkStream, frame: object, body: bytes) -> None:
        heard.append(ticks.count)
        stream.send(Result(8), body)

    async with linked(answer=answer) as pair:
        await ask_at_once(pair, 50)
    assert len({*heard[1:]}) == 1  # the first one left before the others were asked


async def test_a_slow_flood_waits_in_line_too(clock: Clock) -> None:
    def answer(stream: LinkStream, frame: object, body: bytes) -> None:
        clock.now_s += 0.0003
        stream.send(Result(8), body)

    async with linked(answer=answer) as pair:
        await ask_at_once(pair, 10 * AT_ONCE)


async def test_a_flood_of_legal_requests_is_answered_to_the_end() -> None:
    async with linked() as pair:
        await ask_at_once(pair, 10 * AT_ONCE)


async def test_who_asks_once_need_not_wait_for_a_flood() -> None:
    service = ScriptedService()
    listener = await listen(
        "tcp://:0", identity=name_of("far"), service_for=lambda _: service
    )
    flood = await dial(listener.url, identity=name_of("flood"))
    honest = await dial(listener.url, identity=name_of("honest"))
    hearers = [Hearer() for _ in range(3000)]
    for hearer in hearers:
        flood.open_stream(hearer, Peek(has_key=True))
    flood._outgoing.flush()
    once = Hearer()
    honest.open_stream(once, Peek(has_key=True))
    await once.next()
    assert len(service.asked) < 1500
    await hearers[-1].next()
    for each in (honest, flood, listener):
        await each.aclose()
