"""Every public coroutine of connectors, cancelled wherever it waits."""

from __future__ import annotations

from collections.abc import Callable
from types import CodeType
from typing import Any

import pytest

from asynckv.testing.cancellations.connectors.coroutines import codes_of_coroutines
from asynckv.testing.cancellations.connectors.everything import GROUNDS, run_scenarios
from asynckv.testing.cancellations.sweeper import Sweeper

pytestmark = [pytest.mark.trust, pytest.mark.timeout(3600)]


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
    public = codes_of_coroutines()
    figures(f"{total} cancellations in {len(places)} coroutines, {len(public)} public")
    assert [name for name, code in public.items() if code not in places] == []
