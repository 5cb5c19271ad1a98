"""Inserts are in whole or not at all; what a cancelled select held is there again."""

from __future__ import annotations

import asyncio
from typing import Any, Final

from asynckv.testing.blocked import until
from asynckv.testing.cancellation import Outcome
from asynckv.testing.expectations import expect
from harness.cancellations.entries import (
    OVERWRITE,
    TOKENS,
    Entries,
    Filler,
    Partner,
    expect_overwritten,
)
from harness.cancellations.grounds import Ground, open_ground
from harness.cancellations.sweeper import (
    HUGE,
    LARGE,
    OVER_LINKS,
    SMALL,
    Sweeper,
    scenario,
)

__all__ = ("a_select", "an_insert")

_ONE_SIZE: Final = (SMALL,)


async def _is_whole_or_absent(
    ground: Ground, entries: Entries, outcome: Outcome[None]
) -> None:
    """What is in can be inserted again, with success; so can what is not."""
    await entries.settled(ground.producer)
    if outcome.cancelled:
        expect(not (ground.is_local and entries.is_in), "as if it was never made")
        count = ground.local.statistics().entries
        expect(count == entries.is_in, f"{count} entries of one")
        await entries.insert_again(ground.producer)
    entries.expect_in(True)
    await entries.clear(ground)


@scenario("KVLookupBuffer.insert")
async def an_insert(ground: Ground, sweeper: Sweeper, nbytes: int) -> None:
    """Into a buffer that has room."""
    entries = Entries(ground, nbytes)
    async for cancel in sweeper.sweep():
        entries.begin()
        outcome = await cancel(entries.insert, ground.producer)
        await _is_whole_or_absent(ground, entries, outcome)


@scenario("KVLookupBuffer.insert")
async def an_insert_that_waits_for_room(
    ground: Ground, sweeper: Sweeper, nbytes: int
) -> None:
    """And that gets it, soon or in that very tick."""
    entries, filler = Entries(ground, nbytes), Filler(ground.local)
    async for cancel in sweeper.sweep():
        entries.begin()
        partner = await filler.fill_for(sweeper, filler.free)
        outcome = await cancel(entries.insert, ground.producer)
        await partner.ended()
        await _is_whole_or_absent(ground, entries, outcome)


@scenario("KVLookupBuffer.insert")
async def an_insert_that_goes_straight_to_its_consumer(
    ground: Ground, sweeper: Sweeper, nbytes: int
) -> None:
    """For want of room. If it is cancelled, the consumer has it or waits on."""
    entries, filler = Entries(ground, nbytes), Filler(ground.local)

    def waits_on() -> bool:
        now = ground.local.statistics()
        return (now.waiting_selects, now.leased) == (1, 0)

    async for cancel in sweeper.sweep():
        entries.begin()
        partner = await filler.fill_for(sweeper, entries.take, ground.consumer)
        outcome = await cancel(entries.insert, ground.producer)
        partner.is_over = True
        await ground.producer.peek([1])
        await until(lambda: partner.task.done() or waits_on())
        if not partner.task.done():
            expect(outcome.cancelled, "nobody has it that was inserted")
            await entries.insert_again(ground.producer)
        await partner.ended()
        await filler.free()
        await entries.settled(ground.consumer)
        entries.expect_in(False)


async def _is_given_back(
    ground: Ground, entries: Entries, outcome: Outcome[Any]
) -> None:
    await entries.settled(ground.consumer)
    entries.expect_in(outcome.cancelled)
    await entries.clear(ground)


@scenario("KVLookupBuffer.drop_select")
async def a_select(ground: Ground, sweeper: Sweeper, nbytes: int) -> None:
    """Of an entry that is there, into memory of the caller."""
    entries = Entries(ground, nbytes)
    async for cancel in sweeper.sweep():
        await entries.bring()
        outcome = await cancel(entries.take, ground.consumer)
        entries.into.fill_(OVERWRITE)
        await _is_given_back(ground, entries, outcome)
        expect_overwritten(entries.into)


@scenario("KVLookupBuffer.drop_select")
async def a_select_that_waits(ground: Ground, sweeper: Sweeper, nbytes: int) -> None:
    """For an entry that comes soon, or in that very tick."""
    entries = Entries(ground, nbytes)
    async for cancel in sweeper.sweep():
        entries.begin()
        partner = Partner(
            sweeper,
            lambda: ground.local.statistics().waiting_selects > 0,
            *(entries.insert, ground.producer),
        )
        outcome = await cancel(entries.take, ground.consumer)
        entries.into.fill_(OVERWRITE)
        await partner.ended()
        await _is_given_back(ground, entries, outcome)
        expect_overwritten(entries.into)


@scenario("KVLookupBuffer.drop_select")
async def a_select_before_another(
    ground: Ground, sweeper: Sweeper, nbytes: int
) -> None:
    """The other one gets what the first one gives back."""
    entries = Entries(ground, nbytes)

    def waiting() -> int:
        return ground.local.statistics().waiting_selects

    async for cancel in sweeper.sweep():
        entries.begin()
        other = Partner(
            sweeper, lambda: waiting() == 1, entries.take_new, ground.producer
        )
        partner = Partner(
            sweeper, lambda: waiting() == 2, entries.insert, ground.producer
        )
        outcome = await cancel(entries.take_new, ground.consumer)
        other.is_over = True
        await partner.ended()
        await entries.settled(ground.consumer)
        if outcome.cancelled:
            await other.ended()
        else:
            expect(waiting() == 1, "both have it")
            other.task.cancel()
            await asyncio.wait({other.task})
        await entries.settled(ground.producer)
        entries.expect_in(False)


@scenario("KVLookupBuffer.drop_select", kinds=OVER_LINKS, sizes=(LARGE,))
async def a_select_that_waits_for_its_bound(
    ground: Ground, sweeper: Sweeper, nbytes: int
) -> None:
    """What was received before fills it, until it is handed over."""
    entries, budget = Entries(ground, nbytes), ground.watched.peers[1].budget

    async def release() -> None:
        budget.release(budget.max_bytes)

    async for cancel in sweeper.sweep():
        await entries.bring()
        await budget.reserve(budget.max_bytes)
        partner = Partner(sweeper, lambda: len(budget._line) > 0, release)
        outcome = await cancel(entries.take_new, ground.consumer)
        await partner.ended()
        await _is_given_back(ground, entries, outcome)


@scenario("DropSelect.__aenter__", "DropSelect.__aexit__")
async def a_borrow(ground: Ground, sweeper: Sweeper, nbytes: int) -> None:
    """Before, inside and on the way out of its body."""
    entries, is_used = Entries(ground, nbytes), False

    async def borrow() -> None:
        nonlocal is_used
        async with ground.consumer.drop_select(TOKENS) as entry:
            try:
                entries.expect_is(entry)
                await ground.producer.peek(TOKENS)
                await asyncio.sleep(0)
                entries.expect_is(entry)
                is_used = True
            finally:
                del entry  # an error would keep a view of the buffer's memory

    async for cancel in sweeper.sweep():
        is_used = False
        await entries.bring()
        outcome = await cancel(borrow)
        await entries.settled(ground.consumer)
        is_back = entries.is_in if outcome.cancelled and is_used else not is_used
        entries.expect_in(is_back)
        await entries.clear(ground)


@scenario("KVLookupBuffer.peek", sizes=_ONE_SIZE)
async def a_peek(ground: Ground, sweeper: Sweeper, nbytes: int) -> None:
    """Takes nothing."""
    entries = Entries(ground, nbytes)
    async for cancel in sweeper.sweep():
        await entries.bring()
        outcome = await cancel(ground.consumer.peek, TOKENS)
        expect(outcome.cancelled or outcome.value == 1, f"peek: {outcome}")
        await entries.settled(ground.consumer)
        entries.expect_in(True)
        await entries.clear(ground)


@scenario("KVLookupBuffer.taken", sizes=_ONE_SIZE)
async def a_taken(ground: Ground, sweeper: Sweeper, nbytes: int) -> None:
    """Leaves no trace, and the next call hears of it all the same."""
    entries = Entries(ground, nbytes)

    async def wait(asked: asyncio.Event) -> None:
        asyncio.get_running_loop().call_soon(asked.set)
        await ground.producer.taken(entries.name)

    async for cancel in sweeper.sweep():
        asked = asyncio.Event()
        await entries.bring()
        partner = Partner(sweeper, asked.is_set, entries.take, ground.consumer)
        await cancel(wait, asked)
        await partner.ended()
        await ground.producer.taken(entries.name)
        entries.expect_in(False)


@scenario("KVLookupBuffer.withdraw", sizes=_ONE_SIZE)
async def a_withdraw(ground: Ground, sweeper: Sweeper, nbytes: int) -> None:
    """Removes the entry or does not."""
    entries = Entries(ground, nbytes)
    async for cancel in sweeper.sweep():
        await entries.bring()
        outcome = await cancel(ground.producer.withdraw, entries.name)
        await entries.settled(ground.producer)
        expect(outcome.cancelled or outcome.value is True, "it was there")
        expect(outcome.cancelled or not entries.is_in, "it was removed")
        if entries.is_in:
            entries.expect_in(True)
        await entries.clear(ground)


@scenario(
    *("KVLookupBuffer.insert", "KVLookupBuffer.drop_select"),
    kinds=("local", "mem", "tcp"),
    sizes=(HUGE,),
    is_costly=True,
)
async def a_huge_entry(ground: Ground, sweeper: Sweeper, nbytes: int) -> None:
    """Of several chunks, where there is room for it: stopped in the middle of them."""
    opened = open_ground(ground.kind, max_bytes=2 * nbytes, **ground.options)
    async with opened as wide:
        await an_insert.run(wide, sweeper, nbytes)
        await a_select.run(wide, sweeper, nbytes)
