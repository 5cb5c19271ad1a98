"""Every public coroutine, cancelled wherever it waits, and in the tick it is done."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from asynckv.testing.cancellations.everything import run_scenarios
from asynckv.testing.cancellations.grounds import GROUNDS, Kind, open_ground
from asynckv.testing.cancellations.sweeper import Sweeper
from asynckv.testing.certificates import Authority

pytestmark = [pytest.mark.trust, pytest.mark.timeout(3600)]

RUNS = 2 * len(GROUNDS)


@pytest.fixture(scope="module")
def account() -> dict[str, int]:
    """How often each run has cancelled."""
    return {}


@pytest.mark.both_loops
@pytest.mark.parametrize("kind", GROUNDS)
async def test_no_cancellation_breaks_a_promise(
    kind: Kind,
    scale: Any,
    figures: Callable[[str], None],
    authority: Authority,
    account: dict[str, int],
) -> None:
    sweeper = Sweeper()
    options = {"tls": authority.issue()} if kind == "tls" else {}
    quota = -(-scale.cancellations // RUNS)
    async with open_ground(kind, **options) as ground:
        await run_scenarios(ground, sweeper, at_least=quota)
    loop = type(asyncio.get_running_loop()).__module__.partition(".")[0]
    account[f"{kind} {loop}"] = sweeper.cancelled
    figures(
        f"{sweeper.cancelled} cancellations in {sweeper.rounds} rounds, "
        f"in {len(sweeper.places)} coroutines"
    )
    assert sweeper.cancelled >= quota


def test_they_were_many(
    scale: Any, figures: Callable[[str], None], account: dict[str, int]
) -> None:
    if len(account) < RUNS:
        pytest.skip("some of them did not run, or failed")
    total = sum(account.values())
    figures(f"{total} cancellations on {len(account)} grounds and loops")
    assert total >= scale.cancellations
