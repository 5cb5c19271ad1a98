"""Inserts: in whole or not at all, and never with what the caller writes later."""

from __future__ import annotations

from typing import Final

from asynckv.testing.blocked import until
from asynckv.testing.cancellation import Outcome
from asynckv.testing.expectations import expect
from harness.cancellations.entries import Entries
from harness.cancellations.grounds import Ground
from harness.cancellations.partners import Filler, Partner
from harness.cancellations.scenario import Scenario
from harness.cancellations.sweeper import Sweeper

__all__ = (
    "INSERTING",
    "an_insert",
    "an_insert_that_goes_straight_to_its_consumer",
    "an_insert_that_waits_for_room",
)


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
    await entries.clear(ground.consumer)
    await ground.check_quiet()


async def an_insert(ground: Ground, sweeper: Sweeper, nbytes: int) -> None:
    """Into a buffer that has room."""
    entries = Entries(ground, nbytes)

    async def before() -> None:
        entries.begin()

    async def check(outcome: Outcome[None]) -> None:
        await _is_whole_or_absent(ground, entries, outcome)

    await sweeper.sweep(
        f"an insert of {nbytes} bytes",
        lambda: entries.insert(ground.producer),
        check,
        before,
    )


async def an_insert_that_waits_for_room(
    ground: Ground, sweeper: Sweeper, nbytes: int
) -> None:
    """And that gets it, soon or in that very tick."""
    entries, filler = Entries(ground, nbytes), Filler(ground.local)
    partner: Partner

    async def before() -> None:
        nonlocal partner
        entries.begin()
        partner = await filler.fill_for(sweeper, filler.free)

    async def check(outcome: Outcome[None]) -> None:
        await partner.ended()
        await _is_whole_or_absent(ground, entries, outcome)

    await sweeper.sweep(
        f"an insert of {nbytes} bytes that waits",
        lambda: entries.insert(ground.producer),
        check,
        before,
    )


async def an_insert_that_goes_straight_to_its_consumer(
    ground: Ground, sweeper: Sweeper, nbytes: int
) -> None:
    """For want of room. If it is cancelled, the consumer has it or waits on."""
    entries, filler = Entries(ground, nbytes), Filler(ground.local)
    partner: Partner

    async def before() -> None:
        nonlocal partner
        entries.begin()
        partner = await filler.fill_for(sweeper, lambda: entries.take(ground.consumer))

    def waits_on() -> bool:
        now = ground.local.statistics()
        return (now.waiting_selects, now.leased) == (1, 0)

    async def check(outcome: Outcome[None]) -> None:
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
        await ground.check_quiet()

    await sweeper.sweep(
        f"an insert of {nbytes} bytes that is selected",
        lambda: entries.insert(ground.producer),
        check,
        before,
    )


INSERTING: Final = (
    Scenario(an_insert, ("KVLookupBuffer.insert",)),
    Scenario(an_insert_that_waits_for_room, ("KVLookupBuffer.insert",)),
    Scenario(an_insert_that_goes_straight_to_its_consumer, ("KVLookupBuffer.insert",)),
)
