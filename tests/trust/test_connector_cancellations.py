"""Every public coroutine of connectors, cancelled wherever it waits."""

from __future__ import annotations

from collections.abc import Callable
from types import CodeType
from typing import Any

import pytest

from harness.cancellations.connectors.coroutines import codes_of_coroutines
from harness.cancellations.connectors.everything import (
    COSTLY_GROUNDS,
    GROUNDS,
    run_scenarios,
)
from harness.cancellations.sweeper import Sweeper

pytestmark = [
    pytest.mark.trust,
    pytest.mark.longest,
    pytest.mark.timeout(3600),
]

PUBLIC = codes_of_coroutines()
BY_TLS = ("MultiWorker.start", "P2PRoutes.open", "P2PWorker.start")
"""Without it, serving waits for nothing; cancelled before they begin they are."""


async def test_no_cancellation_of_a_connector_breaks_a_promise(
    scale: Any, figures: Callable[[str], None]
) -> None:
    quota = -(-scale.connector_cancellations // len(GROUNDS))
    is_short = not scale.costly_grounds
    total, places = 0, set[CodeType]()
    for name in GROUNDS:
        if is_short and not COSTLY_GROUNDS.get(name, True):
            continue
        sweeper = Sweeper()
        await run_scenarios(name, sweeper, at_least=quota, is_short=is_short)
        assert sweeper.cancelled >= quota or (is_short and name in COSTLY_GROUNDS)
        total += sweeper.cancelled
        places |= sweeper.places
        figures(f"{name}: {sweeper.cancelled} cancellations in {sweeper.rounds} rounds")
    figures(f"{total} cancellations in {len(places)} coroutines, {len(PUBLIC)} public")
    left_out = [name for name, code in PUBLIC.items() if code not in places]
    assert [name for name in left_out if name not in BY_TLS] == []
