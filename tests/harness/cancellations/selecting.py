"""Selects: what a cancelled one held is there again, what another one holds is not."""

from __future__ import annotations

import asyncio
from typing import Any, Final

from asynckv.abc import KVEntry, KVLookupBuffer
from asynckv.testing.cancellation import Outcome
from asynckv.testing.expectations import expect
from harness.cancellations.entries import (
    LARGE,
    OVERWRITE,
    SMALL,
    TOKENS,
    Entries,
    expect_overwritten,
)
from harness.cancellations.grounds import OVER_LINKS, Ground
from harness.cancellations.partners import Partner
from harness.cancellations.scenario import Scenario
from harness.cancellations.sweeper import Sweeper

__all__ = (
    "SELECTING",
    "a_borrow",
    "a_peek",
    "a_select",
    "a_select_before_another",
    "a_select_that_waits",
    "a_select_that_waits_for_its_bound",
    "a_taken",
    "a_withdraw",
)


async def _is_given_back(
    ground: Ground, entries: Entries, outcome: Outcome[Any]
) -> None:
    await entries.settled(ground.consumer)
    entries.expect_in(outcome.cancelled)
    await entries.clear(ground.consumer)
    await ground.check_quiet()
    expect_overwritten(entries.into)


async def a_select(ground: Ground, sweeper: Sweeper, nbytes: int) -> None:
    """Of an entry that is there, into memory of the caller."""
    entries = Entries(ground, nbytes)

    async def check(outcome: Outcome[KVEntry]) -> None:
        entries.into.fill_(OVERWRITE)
        await _is_given_back(ground, entries, outcome)

    await sweeper.sweep(
        f"a select of {nbytes} bytes",
        lambda: entries.take(ground.consumer),
        check,
        entries.bring,
    )


async def a_select_that_waits(ground: Ground, sweeper: Sweeper, nbytes: int) -> None:
    """For an entry that comes soon, or in that very tick."""
    entries = Entries(ground, nbytes)
    partner: Partner

    async def before() -> None:
        nonlocal partner
        entries.begin()
        partner = Partner(
            sweeper,
            lambda: ground.local.statistics().waiting_selects > 0,
            lambda: entries.insert(ground.producer),
        )

    async def check(outcome: Outcome[KVEntry]) -> None:
        entries.into.fill_(OVERWRITE)
        await partner.ended()
        await _is_given_back(ground, entries, outcome)

    await sweeper.sweep(
        f"a select of {nbytes} bytes that waits",
        lambda: entries.take(ground.consumer),
        check,
        before,
    )


async def a_select_before_another(
    ground: Ground, sweeper: Sweeper, nbytes: int
) -> None:
    """The other one gets what the first one gives back."""
    entries = Entries(ground, nbytes)
    other: Partner
    partner: Partner

    async def select(side: KVLookupBuffer) -> KVEntry:
        entry = await side.drop_select(TOKENS)
        entries.expect_is(entry)
        return entry

    def waiting() -> int:
        return ground.local.statistics().waiting_selects

    async def before() -> None:
        nonlocal other, partner
        entries.begin()
        other = Partner(
            sweeper, lambda: waiting() == 1, lambda: select(ground.producer)
        )
        partner = Partner(
            sweeper, lambda: waiting() == 2, lambda: entries.insert(ground.producer)
        )

    async def check(outcome: Outcome[KVEntry]) -> None:
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
        await ground.check_quiet()

    await sweeper.sweep(
        f"a select of {nbytes} bytes before another",
        lambda: select(ground.consumer),
        check,
        before,
    )


async def a_select_that_waits_for_its_bound(
    ground: Ground, sweeper: Sweeper, nbytes: int
) -> None:
    """What was received before fills it, until it is handed over."""
    entries = Entries(ground, nbytes)
    budget = ground.watched.peers[1].budget
    partner: Partner

    async def release() -> None:
        budget.release(budget.max_bytes)

    async def before() -> None:
        nonlocal partner
        await entries.bring()
        await budget.reserve(budget.max_bytes)
        partner = Partner(sweeper, lambda: len(budget._line) > 0, release)

    async def select() -> KVEntry:
        entry = await ground.consumer.drop_select(TOKENS)
        entries.expect_is(entry)
        return entry

    async def check(outcome: Outcome[KVEntry]) -> None:
        await partner.ended()
        await entries.settled(ground.consumer)
        entries.expect_in(outcome.cancelled)
        await entries.clear(ground.consumer)
        await ground.check_quiet()

    await sweeper.sweep("a select that waits for its bound", select, check, before)


async def a_borrow(ground: Ground, sweeper: Sweeper, nbytes: int) -> None:
    """Before, inside and on the way out of its body."""
    entries = Entries(ground, nbytes)
    is_used = False

    async def before() -> None:
        nonlocal is_used
        is_used = False
        await entries.bring()

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

    async def check(outcome: Outcome[None]) -> None:
        await entries.settled(ground.consumer)
        is_back = entries.is_in if outcome.cancelled and is_used else not is_used
        entries.expect_in(is_back)
        await entries.clear(ground.consumer)
        await ground.check_quiet()

    await sweeper.sweep(f"a borrow of {nbytes} bytes", borrow, check, before)


async def a_peek(ground: Ground, sweeper: Sweeper, nbytes: int) -> None:
    """Takes nothing."""
    entries = Entries(ground, nbytes)

    async def check(outcome: Outcome[int]) -> None:
        expect(outcome.cancelled or outcome.value == 1, f"peek: {outcome}")
        await entries.settled(ground.consumer)
        entries.expect_in(True)
        await entries.clear(ground.consumer)
        await ground.check_quiet()

    await sweeper.sweep(
        "a peek", lambda: ground.consumer.peek(TOKENS), check, entries.bring
    )


async def a_taken(ground: Ground, sweeper: Sweeper, nbytes: int) -> None:
    """Leaves no trace, and the next call hears of it all the same."""
    entries = Entries(ground, nbytes)
    partner: Partner
    is_asked = False

    async def before() -> None:
        nonlocal partner, is_asked
        is_asked = False
        await entries.bring()
        partner = Partner(
            sweeper, lambda: is_asked, lambda: entries.take(ground.consumer)
        )

    async def wait() -> None:
        nonlocal is_asked
        asyncio.get_running_loop().call_soon(ask)
        await ground.producer.taken(entries.name)

    def ask() -> None:
        nonlocal is_asked
        is_asked = True

    async def check(outcome: Outcome[None]) -> None:
        await partner.ended()
        await ground.producer.taken(entries.name)
        entries.expect_in(False)
        await ground.check_quiet()

    await sweeper.sweep("a taken", wait, check, before)


async def a_withdraw(ground: Ground, sweeper: Sweeper, nbytes: int) -> None:
    """Removes the entry or does not."""
    entries = Entries(ground, nbytes)

    async def check(outcome: Outcome[bool]) -> None:
        await entries.settled(ground.producer)
        expect(outcome.cancelled or outcome.value is True, "it was there")
        expect(outcome.cancelled or not entries.is_in, "it was removed")
        if entries.is_in:
            entries.expect_in(True)
        await entries.clear(ground.consumer)
        await ground.check_quiet()

    await sweeper.sweep(
        "a withdraw",
        lambda: ground.producer.withdraw(entries.name),
        check,
        entries.bring,
    )


_SMALL_ONLY: Final = (SMALL,)

SELECTING: Final = (
    Scenario(a_select, ("KVLookupBuffer.drop_select",)),
    Scenario(a_select_that_waits, ("KVLookupBuffer.drop_select",)),
    Scenario(a_select_before_another, ("KVLookupBuffer.drop_select",)),
    Scenario(
        a_select_that_waits_for_its_bound,
        ("KVLookupBuffer.drop_select",),
        OVER_LINKS,
        (LARGE,),
    ),
    Scenario(a_borrow, ("DropSelect.__aenter__", "DropSelect.__aexit__")),
    Scenario(a_peek, ("KVLookupBuffer.peek",), sizes=_SMALL_ONLY),
    Scenario(a_taken, ("KVLookupBuffer.taken",), sizes=_SMALL_ONLY),
    Scenario(a_withdraw, ("KVLookupBuffer.withdraw",), sizes=_SMALL_ONLY),
)
