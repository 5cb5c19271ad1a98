from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from asynckv.errors import PeerLost
from asynckv.testing.blocked import until_blocked
from asynckv.waits.waiting import Reply, Waits, Watchers, in_turns


async def test_the_first_answer_counts() -> None:
    answer: Reply[int] = Reply()
    answer.give(1)
    answer.give(2)
    answer.fail(PeerLost("cut"))
    answer.check()
    assert answer.is_in and await answer == 1


async def test_a_failure_is_raised_by_who_waits_and_who_looks() -> None:
    answer: Reply[int] = Reply()
    answer.check()
    answer.fail(PeerLost("cut"))
    answer.give(1)
    with pytest.raises(PeerLost, match="cut"):
        answer.check()
    with pytest.raises(PeerLost, match="cut"):
        await answer


async def test_what_is_not_awaited_any_more_is_in() -> None:
    answer: Reply[int] = Reply()

    async def wait() -> int:
        return await answer

    task = asyncio.create_task(wait())
    await until_blocked(task)
    task.cancel()
    await asyncio.wait({task})
    answer.fail(PeerLost("cut"))
    answer.check()
    assert answer.is_in


async def test_it_ends_when_it_is_so() -> None:
    waits, found = Waits(asyncio.get_running_loop()), list[int]()
    task = asyncio.create_task(waits.wait(lambda: bool(found), timeout_s=None))
    await until_blocked(task)
    waits.settle()
    found.append(1)
    waits.settle()
    await task


async def test_it_does_not_wait_for_what_is_so() -> None:
    await Waits(asyncio.get_running_loop()).wait(lambda: True, timeout_s=None)


async def test_a_bounded_wait_ends_in_time() -> None:
    await Waits(asyncio.get_running_loop()).wait(lambda: False, timeout_s=0.01)


async def test_who_is_cancelled_is_forgotten() -> None:
    waits = Waits(asyncio.get_running_loop())
    task = asyncio.create_task(waits.wait(lambda: False, timeout_s=None))
    await until_blocked(task)
    task.cancel()
    await asyncio.wait({task})
    waits.settle()
    assert task.cancelled()


async def test_all_who_wait_are_woken_once() -> None:
    watchers = Watchers()
    waiting = [watchers.next_change(asyncio.get_running_loop()) for _ in range(3)]
    watchers.wake()
    await asyncio.gather(*waiting)
    later = watchers.next_change(asyncio.get_running_loop())
    assert not later.done()
    watchers.wake()
    assert later.done()
    watchers.wake()  # nobody waits


@pytest.mark.parametrize("number", range(3))
async def test_who_was_cancelled_is_passed_over(number: int) -> None:
    watchers = Watchers()

    async def wait() -> None:
        await watchers.next_change(asyncio.get_running_loop())

    there = [asyncio.create_task(wait()) for _ in range(3)]
    gone = there.pop(number)
    await until_blocked(gone, *there)
    gone.cancel()
    await asyncio.wait({gone})
    watchers.wake()
    await asyncio.gather(*there)


async def test_who_was_cancelled_is_not_remembered() -> None:
    watchers, loop = Watchers(), asyncio.get_running_loop()
    for _ in range(3):
        watchers.next_change(loop).cancel()
    assert len(watchers) == 0 and watchers._others is None
    watchers.next_change(loop)
    watchers.next_change(loop)
    assert len(watchers) == 2


def steps(taken: list[int]) -> Iterator[None]:
    for number in range(3):
        taken.append(number)
        yield


async def test_steps_are_taken_in_turns_of_the_loop() -> None:
    taken = list[int]()
    in_turns(steps(taken))
    assert taken == [0]
    await asyncio.sleep(0)
    assert taken == [0, 1]
    await asyncio.sleep(0)
    assert taken == [0, 1, 2]


def test_where_no_loop_runs_all_steps_are_taken_at_once() -> None:
    taken = list[int]()
    in_turns(steps(taken))
    assert taken == [0, 1, 2]
