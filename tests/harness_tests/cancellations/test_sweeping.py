"""A sweep cancels at each suspension, then at random until it is enough."""

from __future__ import annotations

import random
import re
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from asynckv.testing.cancellation import Outcome
from harness.cancellations import everything
from harness.cancellations.connectors import everything as of_connectors
from harness.cancellations.connectors.scenario import ConnectorScenario
from harness.cancellations.grounds import open_ground
from harness.cancellations.scenario import Scenario
from harness.cancellations.sweeper import MODES, Sweeper, ticks


async def three_suspensions() -> None:
    await ticks(3)


async def look_away(outcome: Outcome[Any]) -> None:
    """Check nothing."""


async def test_it_cancels_at_each_suspension_by_each_mode_and_then_at_random() -> None:
    sweeper = Sweeper()
    await sweeper.sweep("ticks", three_suspensions, look_away)
    assert sweeper.rounds == 1 + (3 + 1) * len(MODES)
    assert sweeper.cancelled == 1 + 3 * len(MODES)
    names = {code.co_name for code in sweeper.places}
    assert names >= {"three_suspensions", "ticks"}
    first = sweeper.rounds
    sweeper.chance, sweeper.rounds_each = random.Random(1), 7
    await sweeper.sweep("ticks", three_suspensions, look_away)
    assert sweeper.rounds == first + 7


async def test_an_error_names_the_call_and_the_round() -> None:
    async def check(outcome: Outcome[Any]) -> None:
        raise AssertionError("broken")

    with pytest.raises(AssertionError, match="broken") as caught:
        await Sweeper().sweep("a call", three_suspensions, check)
    assert caught.value.__notes__ == ["a call, cancelled by 'task' at suspension 0"]


async def three_ticks(ground: object, sweeper: Sweeper, nbytes: int = 1) -> None:
    async def check(outcome: object) -> None:
        assert sweeper.chance is None or sweeper.cancelled < 60

    await sweeper.sweep("ticks", three_suspensions, check)


async def run_buffers(sweeper: Sweeper, at_least: int) -> None:
    async with open_ground("local") as ground:
        await everything.run_scenarios(ground, sweeper, at_least=at_least, seed=7)


async def run_connectors(sweeper: Sweeper, at_least: int) -> None:
    await of_connectors.run_scenarios("store", sweeper, at_least=at_least, seed=7)


RUNS = {
    "buffers": (run_buffers, r"7 \d three_ticks 1 on local"),
    "connectors": (run_connectors, r"three_ticks: 7 \d on store"),
}


@pytest.mark.parametrize(("run", "note"), RUNS.values(), ids=RUNS)
async def test_all_are_swept_until_it_is_enough_or_a_promise_is_broken(
    run: Callable[[Sweeper, int], Awaitable[None]],
    note: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scenarios = [Scenario(three_ticks, (), sizes=(1,))]
    monkeypatch.setattr(everything, "SCENARIOS", scenarios)
    monkeypatch.setattr(of_connectors, "STORES", [ConnectorScenario(three_ticks, ())])
    sweeper = Sweeper()
    await run(sweeper, 50)
    assert 50 <= sweeper.cancelled < 50 + sweeper.rounds_each
    with pytest.raises(AssertionError) as caught:
        await run(Sweeper(), 1000)
    assert re.fullmatch(note, caught.value.__notes__[-1])
