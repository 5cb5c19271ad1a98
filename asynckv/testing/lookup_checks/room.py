"""What happens when there is no room, and at the end."""

from __future__ import annotations

import asyncio
from typing import Final

import torch

from asynckv.abc import KVLookupBuffer
from asynckv.buffers.lookup import LookupBuffer
from asynckv.errors import BufferClosed, EntryTooLarge
from asynckv.testing.lookup_checks.values import (
    LOOKUP_MAX_BYTES,
    MIB,
    LookupCheck,
    cancelled,
    empty,
    expect,
    expect_error,
    fill,
    five_waiting,
    noise,
    same,
    until_waiting,
)

__all__ = (
    "ROOM_CHECKS",
    "a_cancelled_wait_leaves_no_trace",
    "a_direct_delivery_given_back_goes_to_the_next",
    "a_waiting_insert_goes_straight_to_who_selects_it",
    "closing_ends_every_wait",
    "what_could_never_fit_is_refused_at_once",
)


async def what_could_never_fit_is_refused_at_once(
    producer: KVLookupBuffer, consumer: KVLookupBuffer, local: LookupBuffer
) -> None:
    """With what it has and what there could be."""
    key = torch.zeros(LOOKUP_MAX_BYTES, dtype=torch.uint8)
    error = await expect_error(
        EntryTooLarge, producer.insert, [1], None, key, None, None
    )
    expect(error.nbytes == LOOKUP_MAX_BYTES + 8, error.nbytes)
    expect(error.max_bytes == LOOKUP_MAX_BYTES, error.max_bytes)
    await empty(local)


async def a_waiting_insert_goes_straight_to_who_selects_it(
    producer: KVLookupBuffer, consumer: KVLookupBuffer, local: LookupBuffer
) -> None:
    """A buffer full of unwanted entries with five inserts waiting."""
    await fill(producer)
    inserts = await five_waiting(producer, local)
    async with asyncio.timeout(10):
        entry = await consumer.drop_select([5])
    expect(same(entry.key, noise(MIB, 5)), "its bytes")
    await inserts[4]
    expect(not any(task.done() for task in inserts[:4]), "the others wait")
    await consumer.drop_select([0])
    await asyncio.gather(*inserts[:3])
    expect(not inserts[3].done(), "there was room for three")
    order = [(await consumer.drop_select()).entry_id for _ in range(4)]
    expect(order == ["1", "2", "3", "4"], order)
    await inserts[3]
    await empty(local)


async def a_direct_delivery_given_back_goes_to_the_next(
    producer: KVLookupBuffer, consumer: KVLookupBuffer, local: LookupBuffer
) -> None:
    """The insert goes on waiting until somebody acknowledges."""
    await fill(producer)
    insert = asyncio.create_task(
        producer.insert([1], None, noise(MIB), None, None, entry_id="it")
    )
    await until_waiting(local, inserts=1)
    try:
        async with consumer.drop_select([1]) as entry:
            second = asyncio.create_task(consumer.drop_select([1]))
            await until_waiting(local, selects=1)
            raise LookupError("the application fails")
    except LookupError:
        expect(entry.attempt == 1 and not insert.done(), "not acknowledged")
    async with asyncio.timeout(10):
        entry = await second
        expect(await insert == "it", "the insert returns")
    expect(entry.attempt == 2 and same(entry.key, noise(MIB)), entry.attempt)
    await consumer.drop_select([0])
    await empty(local)


async def a_cancelled_wait_leaves_no_trace(
    producer: KVLookupBuffer, consumer: KVLookupBuffer, local: LookupBuffer
) -> None:
    """Neither for room nor for a match."""
    await fill(producer)
    inserts = await five_waiting(producer, local)
    for task in inserts:
        await cancelled(task)
    await until_waiting(local)
    select = asyncio.create_task(consumer.drop_select([1]))
    await until_waiting(local, selects=1)
    await cancelled(select)
    await until_waiting(local)
    await consumer.drop_select([0])
    await producer.insert([1], None, noise(MIB), None, None)
    await consumer.drop_select([1])
    await empty(local)


async def closing_ends_every_wait(
    producer: KVLookupBuffer, consumer: KVLookupBuffer, local: LookupBuffer
) -> None:
    """With ``BufferClosed``, for inserts and selects alike."""
    await fill(producer)
    inserts = await five_waiting(producer, local)
    select = asyncio.create_task(consumer.drop_select([77]))
    await until_waiting(local, inserts=5, selects=1)
    await local.aclose()
    for task in (*inserts, select):
        await expect_error(BufferClosed, asyncio.wait_for, task, 10)
    await expect_error(BufferClosed, consumer.drop_select, [1])
    await expect_error(BufferClosed, producer.insert, [1], None, None, None, None)
    await empty(local)


ROOM_CHECKS: Final[tuple[LookupCheck, ...]] = (
    what_could_never_fit_is_refused_at_once,
    a_waiting_insert_goes_straight_to_who_selects_it,
    a_direct_delivery_given_back_goes_to_the_next,
    a_cancelled_wait_leaves_no_trace,
    closing_ends_every_wait,
)
