from __future__ import annotations

import asyncio
import logging

import pytest

from asynckv.testing.blocked import until_blocked
from asynckv.testing.cancellation import CancelMode, Outcome, sweep_cancellation
from asynckv.waits.waiting import ByteRoom, FairQueue


class Counter:
    """Gives to so many, first come, first served; lets those pass who are patient."""

    def __init__(self) -> None:
        self.left = 0
        self.given: list[str] = []
        self.patient: set[str] = set()
        self.line: FairQueue[str] = FairQueue(self.give, self.patient.__contains__)

    def give(self, ticket: str) -> bool:
        if not self.left:
            return False
        self.left -= 1
        self.given.append(ticket)
        return True

    def add(self, count: int = 1) -> None:
        self.left += count
        self.line.change()


def room_of(max_bytes: int) -> ByteRoom:
    return ByteRoom(max_bytes, who="a box", what="a shelf", ends_with="a box that goes")


async def test_who_comes_first_is_given_to_first() -> None:
    counter = Counter()
    assert not any([counter.line.join("a"), counter.line.join("b")])
    counter.add()
    assert counter.given == ["a"] and list(counter.line) == ["b"]
    counter.left = 1
    assert not counter.line.join("c")
    assert counter.given == ["a", "b"]


async def test_who_passes_keeps_its_place() -> None:
    counter = Counter()
    for ticket in ("a", "b", "c"):
        counter.line.join(ticket)
    counter.patient.add("a")
    counter.add()
    counter.patient.clear()
    counter.add(2)
    assert counter.given == ["b", "a", "c"]


async def test_a_place_that_is_given_up_holds_nobody_up() -> None:
    room = room_of(100)
    await room.take(60)
    large, small = (asyncio.create_task(room.take(n)) for n in (50, 40))
    await until_blocked(large, small)
    large.cancel()
    await small
    assert large.cancelled() and room.used_bytes == 100


async def test_how_long_the_first_waits_is_told() -> None:
    counter = Counter()
    now_s = asyncio.get_running_loop().time()
    assert counter.line.longest_wait_s(now_s) == 0.0
    counter.line.join("a")
    assert counter.line.longest_wait_s(now_s + 10.0) > 9.0
    assert counter.line.quit("a") and not counter.line.quit("a")


async def test_of_thousands_who_wait_only_some_look_in_one_turn_of_the_loop() -> None:
    counter, looks, in_turns = Counter(), [0], list[int]()

    def look(number: int) -> bool:
        looks[0] += 1
        return str(number) not in counter.line

    async def wait(number: int) -> None:
        counter.line.join(str(number))
        await counter.line.until(lambda: look(number))

    waiting = [asyncio.create_task(wait(number)) for number in range(2000)]
    await until_blocked(*waiting)
    counter.add()
    while not waiting[0].done() or looks[0]:
        looks[0] = 0
        await asyncio.sleep(0)
        in_turns.append(looks[0])
    assert sum(in_turns) >= 2000 and max(in_turns) <= 128
    counter.add(1000)
    counter.add(999)  # also while they look
    await asyncio.gather(*waiting)


async def test_what_is_true_already_is_not_waited_for() -> None:
    coroutine = Counter().line.until(lambda: True)
    try:
        coroutine.send(None)
    except StopIteration:
        return
    raise AssertionError("it suspended")


async def test_everybody_looks_again_after_a_change() -> None:
    line, state = Counter().line, [0]
    waiters = [
        asyncio.create_task(line.until(lambda n=n: state[0] >= n))  # type: ignore[misc]
        for n in (1, 2)
    ]
    for n, waiter in enumerate(waiters, start=1):
        await asyncio.sleep(0)
        state[0] = n
        line.change()
        await waiter
    await line.aclose()


async def test_nobody_is_notified_when_nobody_waits() -> None:
    line = Counter().line
    line.change()
    assert len(asyncio.all_tasks()) == 1
    await line.aclose()


async def test_a_cancelled_wait_takes_no_wakeup_from_another() -> None:
    line, state = Counter().line, [False]
    others: list[asyncio.Task[None]] = []

    async def before() -> None:
        state[0] = False
        others.append(asyncio.create_task(line.until(lambda: state[0])))
        asyncio.get_running_loop().call_soon(let)

    def let() -> None:
        state[0] = True
        line.change()

    async def check(k: int, mode: CancelMode, outcome: Outcome[None]) -> None:
        await others.pop()

    await sweep_cancellation(lambda: line.until(lambda: state[0]), check, before=before)
    await line.aclose()


async def test_a_cancelled_take_leaves_no_trace() -> None:
    room = room_of(100)

    async def before() -> None:
        await room.take(100)
        asyncio.get_running_loop().call_soon(room.release, 100)

    async def check(k: int, mode: CancelMode, outcome: Outcome[None]) -> None:
        if not outcome.cancelled:
            room.release(70)
        await room.take(100)  # all of it is free
        room.release(100)

    await sweep_cancellation(lambda: room.take(70), check, before=before)


async def test_what_a_take_got_as_it_was_cancelled_is_free_again() -> None:
    room = room_of(100)
    await room.take(100)
    taking = asyncio.create_task(room.take(70))
    await until_blocked(taking)
    room.release(100)
    taking.cancel()
    await asyncio.wait({taking})
    assert taking.cancelled() and room.used_bytes == 0


async def test_who_wants_more_than_there_is_gets_it_alone() -> None:
    room = room_of(100)
    await room.take(1)
    large = asyncio.create_task(room.take(200))
    await until_blocked(large)
    room.release(1)
    await large
    small = asyncio.create_task(room.take(1))
    await until_blocked(small)
    room.release(200)
    await small


async def test_a_wait_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "asynckv.observability.waits")
    room = room_of(100)
    await room.take(100)
    assert not caplog.messages
    waiting = asyncio.create_task(room.take(7))
    await until_blocked(waiting)
    room.release(100)
    await waiting
    (message,) = caplog.messages
    assert message.startswith("a box of 7 bytes waits for a shelf; ")
    assert message.endswith("it ends with a box that goes")
