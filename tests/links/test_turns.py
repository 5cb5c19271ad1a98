from __future__ import annotations

import asyncio

import pytest

from asynckv.links import incoming
from asynckv.links.dial import dial
from asynckv.links.incoming import AT_ONCE, Turns
from asynckv.links.link import LinkStream
from asynckv.links.listen import listen
from asynckv.protocol.frames import Peek, Result
from harness.link_pairs import Hearer, LinkPair, ScriptedService, linked, name_of

pytestmark = pytest.mark.both_loops


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
