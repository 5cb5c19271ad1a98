"""Every public coroutine of connectors, cancelled wherever it waits."""

from __future__ import annotations

from collections.abc import Callable
from types import CodeType
from typing import Any

import pytest

from asynckv.testing.cancellations.connectors.coroutines import codes_of_coroutines
from asynckv.testing.cancellations.connectors.everything import (
    GROUNDS,
    LONG_GROUNDS,
    run_scenarios,
)
from asynckv.testing.cancellations.sweeper import Sweeper

pytestmark = pytest.mark.timeout(3600)

PUBLIC = codes_of_coroutines()
BY_TLS = ("MultiWorker.start", "P2PRoutes.open", "P2PWorker.start")
"""Without it, serving waits for nothing; cancelled before they begin they are."""


@pytest.mark.trust
async def test_no_cancellation_of_a_connector_breaks_a_promise(
    scale: Any, figures: Callable[[str], None]
) -> None:
    quota = -(-scale.connector_cancellations // len(GROUNDS))
    total, places = 0, set[CodeType]()
    for name in GROUNDS:
        sweeper = Sweeper()
        await run_scenarios(name, sweeper, at_least=quota)
        assert sweeper.cancelled >= quota
        total += sweeper.cancelled
        places |= sweeper.places
        figures(f"{name}: {sweeper.cancelled} cancellations in {sweeper.rounds} rounds")
    figures(f"{total} cancellations in {len(places)} coroutines, {len(PUBLIC)} public")
    left_out = [name for name, code in PUBLIC.items() if code not in places]
    assert [name for name in left_out if name not in BY_TLS] == []


@pytest.mark.chaos
@pytest.mark.parametrize("name", LONG_GROUNDS)
async def test_nor_does_one_on_a_ground_that_takes_long(
    name: str, scale: Any, figures: Callable[[str], None]
) -> None:
    quota, sweeper = -(-scale.connector_cancellations // len(GROUNDS)), Sweeper()
    await run_scenarios(name, sweeper, at_least=quota)
    figures(f"{name}: {sweeper.cancelled} cancellations in {sweeper.rounds} rounds")
