from __future__ import annotations

import asyncio

import pytest

from asynckv.links.dial import dial
from asynckv.links.incoming import AT_ONCE, Turns
from asynckv.links.listen import listen
from asynckv.protocol.frames import Peek, Result
from harness.link_pairs import Hearer, ScriptedService, linked, name_of

pytestmark = pytest.mark.both_loops


class Talker:
    """Has so many frames to say, and waits again while there are more."""

    def __init__(self, turns: Turns, left: int, heard: list[str], name: str) -> None:
        self._turns = turns
        self._heard = heard
        self._name = name
        self._number = turns.new_number()
        self.left = left
        self.done = asyncio.Event()
        self.largest = 0
        turns.wait(self._number, self)

    def go_on(self, max_count: int) -> int:
        count = min(self.left, max_count)
        self.left -= count
        self.largest = max(self.largest, count)
        self._heard.append(self._name)
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
    turns.note_heard(turns.new_number())
    assert turns.is_shared
    talker = Talker(turns, AT_ONCE, [], "a")
    await talker.done.wait()
    assert talker.largest < AT_ONCE


async def test_who_has_much_to_say_is_not_beside_itself() -> None:
    turns = Turns(asyncio.get_running_loop())
    other = turns.new_number()
    assert not turns.is_shared
    turns.note_heard(other + 1)
    Talker(turns, 1, [], "a")
    assert not turns.is_shared
    turns.note_heard(other)
    turns.note_heard(other + 2)
    Talker(turns, 1, [], "b")
    assert turns.is_shared


async def test_a_flood_of_legal_requests_is_answered_to_the_end() -> None:
    async with linked() as pair:
        hearers = [Hearer() for _ in range(10 * AT_ONCE)]
        for hearer in hearers:
            pair.near.open_stream(hearer, Peek(has_key=True), b"12345678")
        for hearer in hearers:
            assert await hearer.next() == (Result(8), b"12345678")


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
