from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from asynckv.testing.cancellation import Outcome
from harness.cancellations.sweeper import MODES, Sweeper, ticks


async def three_suspensions() -> None:
    await ticks(3)


async def look_away(outcome: Outcome[Any]) -> None:
    """Check nothing."""


async def test_the_first_sweep_cancels_at_each_suspension_by_each_mode() -> None:
    sweeper = Sweeper()
    await sweeper.sweep("ticks", three_suspensions, look_away)
    assert sweeper.rounds == 1 + (3 + 1) * len(MODES)
    assert sweeper.cancelled == 1 + 3 * len(MODES)
    names = {code.co_name for code in sweeper.places}
    assert names >= {"three_suspensions", "ticks"}


async def test_later_sweeps_cancel_at_random_and_as_often_as_told() -> None:
    sweeper = Sweeper()
    await sweeper.sweep("ticks", three_suspensions, look_away)
    first = sweeper.rounds
    sweeper.chance, sweeper.rounds_each = random.Random(1), 7
    await sweeper.sweep("ticks", three_suspensions, look_away)
    assert sweeper.rounds == first + 7


async def test_what_never_suspends_is_not_repeated() -> None:
    async def at_once() -> None:
        pass

    sweeper = Sweeper()
    await sweeper.sweep("at once", at_once, look_away)
    first = sweeper.rounds
    sweeper.chance = random.Random(1)
    await sweeper.sweep("at once", at_once, look_away)
    assert sweeper.rounds == first


async def test_an_error_names_the_call_and_the_round() -> None:
    async def check(outcome: Outcome[Any]) -> None:
        raise AssertionError("broken")

    with pytest.raises(AssertionError, match="broken") as caught:
        await Sweeper().sweep("a call", three_suspensions, check)
    assert caught.value.__notes__ == ["a call, cancelled by 'task' at suspension 0"]


async def test_who_acts_beside_a_call_pauses_only_at_random() -> None:
    sweeper, passed = Sweeper(), 0

    def count() -> None:
        nonlocal passed
        passed += 1
        asyncio.get_running_loop().call_soon(count)

    count()
    await sweeper.pause()
    assert passed == 1
    sweeper.chance = random.Random(1)
    for _ in range(10):
        await sweeper.pause()
    assert passed > 10
