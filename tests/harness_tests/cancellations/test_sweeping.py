"""A sweep cancels at each suspension, then at random until it is enough."""

from __future__ import annotations

import random
import re

import pytest

from asynckv.testing.expectations import expect
from harness.cancellations.everything import run_scenarios
from harness.cancellations.sweeper import MODES, Scenario, Sweeper, scenario, ticks


async def three_suspensions() -> None:
    await ticks(3)


@scenario()
async def three_ticks(ground: object, sweeper: Sweeper, *sizes: int) -> None:
    async for cancel in sweeper.sweep():
        await cancel(three_suspensions)
        expect(sweeper.chance is None or sweeper.cancelled < 60, "broken")


async def test_it_cancels_at_each_suspension_by_each_mode_and_then_at_random() -> None:
    sweeper = Sweeper()
    await three_ticks.run(None, sweeper)
    assert sweeper.rounds == 1 + (3 + 1) * len(MODES)
    assert sweeper.cancelled == 1 + 3 * len(MODES)
    names = {code.co_name for code in sweeper.places}
    assert names >= {"three_suspensions", "ticks"}
    first = sweeper.rounds
    sweeper.chance, sweeper.rounds_each = random.Random(1), 7
    await three_ticks.run(None, sweeper)
    assert sweeper.rounds == first + 7


async def test_an_error_names_the_call_and_the_round() -> None:
    async def broken(ground: object, sweeper: Sweeper) -> None:
        async for cancel in sweeper.sweep("a way"):
            await cancel(three_suspensions)
            raise AssertionError("broken")

    with pytest.raises(AssertionError, match="broken") as caught:
        await Scenario(broken).run(None, Sweeper())
    note = "broken a way, cancelled by 'task' at suspension 0"
    assert caught.value.__notes__ == [note]


@pytest.mark.parametrize("size", [(1,), ()], ids=["of buffers", "of connectors"])
async def test_all_are_swept_until_it_is_enough_or_a_promise_is_broken(
    size: tuple[int, ...],
) -> None:
    sweeper, every = Sweeper(), [(three_ticks, size)]
    await run_scenarios(every, None, sweeper, at_least=50, seed=7)
    assert 50 <= sweeper.cancelled < 50 + sweeper.rounds_each
    with pytest.raises(AssertionError) as caught:
        await run_scenarios(every, None, Sweeper(), at_least=1000, seed=7)
    assert re.fullmatch(r"7 \d on a ground.*", caught.value.__notes__[-1])
