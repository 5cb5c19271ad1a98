"""Every public coroutine, cancelled wherever it waits, and in the tick it is done."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from asynckv.testing.cancellations.coroutines import codes_of_coroutines
from asynckv.testing.cancellations.everything import run_scenarios
from asynckv.testing.cancellations.grounds import GROUNDS, Kind, open_ground
from asynckv.testing.cancellations.sweeper import Sweeper
from asynckv.testing.certificates import Authority

pytestmark = [pytest.mark.trust, pytest.mark.timeout(3600)]

RUNS = 2 * len(GROUNDS)


@pytest.fixture(scope="module")
def account() -> dict[str, Sweeper]:
    """What each run has cancelled."""
    return {}


@pytest.mark.both_loops
@pytest.mark.parametrize("kind", GROUNDS)
async def test_no_cancellation_breaks_a_promise(
    kind: Kind,
    scale: Any,
    figures: Callable[[str], None],
    authority: Authority,
    account: dict[str, Sweeper],
) -> None:
    sweeper = Sweeper()
    options: dict[str, Any] = {"tls": authority.issue()} if kind == "tls" else {}
    quota = -(-scale.cancellations // RUNS)
    async with open_ground(kind, **options) as ground:
        await run_scenarios(ground, sweeper, at_least=quota)
    loop = type(asyncio.get_running_loop()).__module__.partition(".")[0]
    account[f"{kind} {loop}"] = sweeper
    figures(
        f"{sweeper.cancelled} cancellations in {sweeper.rounds} rounds, "
        f"in {len(sweeper.places)} coroutines"
    )
    assert sweeper.cancelled >= quota


def test_they_were_many_and_everywhere(
    scale: Any, figures: Callable[[str], None], account: dict[str, Sweeper]
) -> None:
    if len(account) < RUNS:
        pytest.skip("some of them did not run, or failed")
    total = sum(sweeper.cancelled for sweeper in account.values())
    places = set().union(*(sweeper.places for sweeper in account.values()))
    public = codes_of_coroutines()
    figures(
        f"{total} cancellations on {len(account)} grounds and loops, while in one of "
        f"{len(places)} coroutines, {len(public)} of them public"
    )
    assert total >= scale.cancellations
    assert [name for name, code in public.items() if code not in places] == []
