from __future__ import annotations

import asyncio

import pytest

from asynckv.devices.growth import Growth
from asynckv.errors import EntryTooLarge
from asynckv.tensors.slabs import has_slabs
from asynckv.transfers.delivery import ReceiveBudget
from asynckv.types import TensorSpec


async def started(budget: ReceiveBudget, nbytes: int) -> asyncio.Task[None]:
    task = asyncio.create_task(budget.reserve(nbytes))
    await asyncio.sleep(0)
    return task


async def test_what_exceeds_the_bound_is_refused_at_once() -> None:
    with pytest.raises(EntryTooLarge, match="11 bytes"):
        await ReceiveBudget(10).reserve(11)


async def test_it_waits_for_the_memory_that_comes_back() -> None:
    memory = Growth(2**20)
    budget = ReceiveBudget(2**20, memory)
    await budget.reserve(2**20)
    tensor = budget.empty(TensorSpec((2**20,), "uint8"))
    assert memory.arena.handed_out_bytes == (2**20 if has_slabs() else 0)
    budget.release(2**20)
    del tensor
    await memory.aclose()


async def test_who_is_cancelled_while_a_slab_comes_leaves_no_trace() -> None:
    budget = ReceiveBudget(2**20)
    reserving = await started(budget, 2**20)
    reserving.cancel()
    await asyncio.wait({reserving})
    assert reserving.cancelled() is has_slabs()
    assert budget.used_bytes == (0 if has_slabs() else 2**20)


async def test_bytes_are_given_first_come_first_served() -> None:
    budget = ReceiveBudget(10)
    await budget.reserve(8)
    large, small = await started(budget, 9), await started(budget, 1)
    budget.release(7)
    assert not large.done() and not small.done()
    budget.release(1)
    await asyncio.gather(large, small)
    assert budget.used_bytes == 10


async def test_a_cancelled_wait_leaves_no_trace_and_lets_others_pass() -> None:
    budget = ReceiveBudget(10)
    await budget.reserve(8)
    large, small = await started(budget, 9), await started(budget, 1)
    large.cancel()
    await asyncio.wait({large, small})
    assert large.cancelled() and budget.used_bytes == 9


async def test_a_wait_cancelled_in_the_tick_of_its_turn_gives_the_bytes_back() -> None:
    budget = ReceiveBudget(10)
    await budget.reserve(8)
    waiting = await started(budget, 9)
    budget.release(8)
    waiting.cancel()
    await asyncio.wait({waiting})
    assert waiting.cancelled() and budget.used_bytes == 0


async def test_a_wait_is_logged_with_its_bytes_and_the_bound(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("DEBUG", "asynckv.observability.waits")
    budget = ReceiveBudget(10)
    await budget.reserve(8)
    waiting = await started(budget, 9)
    assert "a delivery of 9 bytes waits for room" in caplog.text
    assert "receive bound of 10 bytes" in caplog.text
    budget.release(8)
    await waiting


async def test_room_passes_the_first_in_line_if_it_is_cancelled_then() -> None:
    budget = ReceiveBudget(10)
    await budget.reserve(10)
    first, second = await started(budget, 4), await started(budget, 7)
    first.cancel()
    budget.release(10)  # in the same tick: nobody in the line has run since
    await asyncio.wait({first, second})
    assert first.cancelled() and budget.used_bytes == 7
