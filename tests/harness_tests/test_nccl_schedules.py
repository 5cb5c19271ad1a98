from __future__ import annotations

import pytest

from asynckv.transports.nccl.worker import DeviceWorker, _Flight
from harness.nccl_schedules import Outcome, run_schedule

QUICK = 12
BATCH = 500
BATCHES = 20


async def run_all(seeds: range) -> Outcome:
    total = Outcome()
    for seed in seeds:
        try:
            found = await run_schedule(seed)
        except BaseException as exc:
            exc.add_note(f"seed {seed}")
            raise
        total.moved += found.moved
        total.failed += found.failed
        total.stopped += found.stopped
        total.given_up += found.given_up
    return total


async def test_no_schedule_is_stuck_and_no_memory_is_touched_too_late() -> None:
    total = await run_all(range(QUICK))
    assert total.moved and total.failed and total.stopped


@pytest.mark.chaos
@pytest.mark.timeout(600)
@pytest.mark.parametrize("batch", range(BATCHES))
async def test_none_of_ten_thousand_schedules_is_stuck(batch: int) -> None:
    total = await run_all(range(1000 + batch * BATCH, 1000 + (batch + 1) * BATCH))
    assert total.moved and total.failed and total.stopped and total.given_up


async def test_memory_that_is_let_go_too_early_is_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The check can fail: who does not wait for the events of an abort is caught."""
    waits = DeviceWorker._has_fired

    def does_not_wait(self: DeviceWorker, flight: _Flight) -> bool:
        return flight.pipe.error is not None or waits(self, flight)

    monkeypatch.setattr(DeviceWorker, "_has_fired", does_not_wait)
    with pytest.raises(AssertionError, match="^memory was freed while a copy was"):
        await run_all(range(60))
