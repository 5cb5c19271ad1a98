from __future__ import annotations

import pytest

from harness.cancellations import everything
from harness.cancellations.grounds import Ground, open_ground
from harness.cancellations.scenario import Scenario
from harness.cancellations.sweeper import Sweeper, ticks


async def three_ticks(ground: Ground, sweeper: Sweeper, nbytes: int) -> None:
    async def check(outcome: object) -> None:
        assert sweeper.chance is None or nbytes < 3

    await sweeper.sweep("ticks", lambda: ticks(3), check)


def use(monkeypatch: pytest.MonkeyPatch, *scenarios: Scenario) -> None:
    monkeypatch.setattr(everything, "SCENARIOS", scenarios)


async def test_it_goes_on_until_it_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, Scenario(three_ticks, (), sizes=(1,)))
    sweeper = Sweeper()
    async with open_ground("local") as ground:
        await everything.run_scenarios(ground, sweeper, at_least=100)
    assert 100 <= sweeper.cancelled < 100 + sweeper.rounds_each


async def test_what_is_costly_is_swept_once(monkeypatch: pytest.MonkeyPatch) -> None:
    costly = Scenario(three_ticks, (), sizes=(3,), is_costly=True)
    use(monkeypatch, costly, Scenario(three_ticks, (), sizes=(1,)))
    async with open_ground("local") as ground:
        await everything.run_scenarios(ground, Sweeper(), at_least=100)


async def test_a_broken_promise_is_told_with_the_seed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use(monkeypatch, Scenario(three_ticks, (), sizes=(3,)))
    with pytest.raises(AssertionError) as caught:
        async with open_ground("local") as ground:
            await everything.run_scenarios(ground, Sweeper(), at_least=100, seed=7)
    assert caught.value.__notes__[-1] == "7 0 three_ticks 3 on local"


async def test_scenarios_are_run_where_they_make_sense(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    elsewhere = Scenario(three_ticks, (), kinds=("tcp",))
    use(monkeypatch, elsewhere, Scenario(three_ticks, (), sizes=(1, 2)))
    async with open_ground("local") as ground:
        assert [n for _, n in everything.scenarios_on(ground)] == [1, 2]
