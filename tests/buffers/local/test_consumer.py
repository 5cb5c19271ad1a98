from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from asynckv.buffers.entries.ledger import Ledger
from asynckv.buffers.local.consumer import LocalConsumer
from asynckv.buffers.lookup import LookupBuffer
from asynckv.devices.copying import CopyPool
from asynckv.errors import BufferClosed, LeaseLost
from asynckv.testing.blocked import until
from asynckv.testing.lookup_checks.values import MIB, borrow, insert, noise
from asynckv.transfers.queries import Query
from asynckv.types import TensorSpec
from harness.ledgers import SteppedLedger

SPECS = {name: TensorSpec((8,), "uint8") for name in ("key", "value")}


async def test_a_taken_back_delivery_waits_for_another_before_it_is_shown() -> None:
    async with LookupBuffer(8 * MIB, max_deliver=1, drain_s=0) as buffer:
        await insert(buffer, 1, 2 * MIB, deliveries=2)
        leave = asyncio.Event()
        failing = asyncio.create_task(borrow(buffer, 1, leave, error=True))
        await until(
            lambda: any(
                x.reached
                for e in buffer.ledger.table.entries.values()
                for x in e.leases.values()
            )
        )
        leave.set()
        slow = asyncio.create_task(borrow(buffer, 1, leave))
        await asyncio.gather(failing, return_exceptions=True)
        assert buffer.statistics().undeliverable == 1
        await until(lambda: buffer.statistics().waiting_selects == 1)
        await insert(buffer, 1)
        await slow  # acknowledges what it was shown
        assert buffer.statistics().entries == 0


async def test_who_holds_too_long_cannot_acknowledge() -> None:
    async with LookupBuffer(1000, max_hold_s=0.001, drain_s=0) as buffer:
        await insert(buffer, 1)
        with pytest.raises(LeaseLost):
            async with buffer.drop_select([1]):
                await until(lambda: buffer.statistics().lapsed == 1)
        assert (await buffer.drop_select([1])).attempt == 2


async def test_a_stream_that_waits_learns_that_its_lease_has_lapsed() -> None:
    async with LookupBuffer(1000, max_hold_s=0.001, drain_s=0) as buffer:
        async with buffer.open_insert([1], None, SPECS) as writer:
            with pytest.raises(LeaseLost):
                async with buffer.open_drop_select([1]) as stream:
                    await stream.wait_for("key")
            await writer.put("key", noise(8))
            await writer.put("value", noise(8))
        await buffer.drop_select([1])


async def test_a_bad_into_does_not_count_as_a_failure() -> None:
    async with LookupBuffer(1000, max_deliver=1, drain_s=0) as buffer:
        await insert(buffer, 1)
        bad = {"key": noise(1)}
        for kind in (buffer.open_drop_select, buffer.drop_select):
            with pytest.raises(ValueError, match="key"):
                async with kind([1], into=bad):
                    pass
        assert (await buffer.drop_select([1])).attempt == 3


async def test_what_was_borrowed_is_gone_after_a_clean_exit_and_back_after_others() -> (
    None
):
    async with LookupBuffer(1000, drain_s=0) as buffer:
        await insert(buffer, 1)
        for error in (LookupError, asyncio.CancelledError):
            with pytest.raises(error):
                async with buffer.drop_select([1]):
                    raise error
        assert buffer.statistics().entries == 1
        async with buffer.drop_select([1]) as entry:
            assert entry.attempt == 3
        assert buffer.statistics().entries == 0


async def test_nothing_is_taken_from_a_closed_buffer() -> None:
    async with LookupBuffer(1000, drain_s=0) as buffer:
        await insert(buffer, 1)
    with pytest.raises(BufferClosed):
        await buffer.drop_select([1])
    for kind in (buffer.open_drop_select, buffer.drop_select):
        with pytest.raises(BufferClosed):
            async with kind([1]):
                pass


class Voiding(CopyPool):
    """Voids the entry the first time that something is copied."""

    def __init__(self, bench: SteppedLedger | Ledger) -> None:
        super().__init__()
        self.bench: SteppedLedger | Ledger | None = bench

    async def copy(self, *args: Any, **options: Any) -> list[bytes]:
        bench, self.bench = self.bench, None
        if bench is not None:
            bench.leases.void(bench.table.entries["first"], "max_deliver")
        return await super().copy(*args, **options)


@pytest.mark.parametrize("way", ["take", "borrow"])
async def test_an_entry_taken_back_while_it_is_copied_is_not_handed_out(
    way: str,
) -> None:
    bench = SteppedLedger(1000)
    for name in ("first", "second"):
        bench.insert(name, nbytes=64)
    consumer = LocalConsumer(bench.leases, Voiding(bench), None, lambda: None)
    targets = {"key": torch.zeros(64, dtype=torch.uint8)}
    if way == "take":
        entry = await consumer.take(Query(None), targets)
    else:
        async with consumer.borrow(Query(None), targets) as entry:
            pass
    assert entry.entry_id == "second"
    assert not bench.table.entries


async def test_an_entry_taken_back_pins_nothing_while_another_is_waited_for() -> None:
    tensors = {"0": noise(MIB), "1": noise(MIB)}
    targets = {"0.key": torch.zeros(MIB, dtype=torch.uint8)}
    async with LookupBuffer(8 * MIB, drain_s=0) as buffer:
        await buffer.insert([1], None, tensors, None, None, entry_id="first")
        pool = Voiding(buffer.ledger)
        consumer = LocalConsumer(buffer.ledger.leases, pool, None, lambda: None)
        taking = asyncio.create_task(consumer.take(Query(None), targets))
        await until(lambda: not buffer.statistics().entries)
        await until(lambda: buffer.statistics().pinned_bytes == 0)
        await insert(buffer, 2)
        with pytest.raises(ValueError, match=r"0\.key"):
            await taking
