"""A ledger that is driven step by step."""

from __future__ import annotations

import pytest

from harness.ledgers import SteppedLedger


@pytest.fixture
async def bench() -> SteppedLedger:
    """One of 100 bytes, which is empty."""
    return SteppedLedger()


@pytest.fixture
async def full() -> SteppedLedger:
    """One that has no room until ``"full"`` leaves."""
    bench = SteppedLedger()
    bench.insert("full", tokens=(9,), nbytes=92)
    return bench
