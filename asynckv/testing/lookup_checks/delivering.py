"""How a delivery ends, how an entry leaves, and what happens when there is no room."""

from __future__ import annotations

import asyncio
import contextlib
from functools import partial
from typing import Final

import torch

from asynckv.abc import KVLookupBuffer
from asynckv.buffers.lookup import LookupBuffer
from asynckv.errors import BufferClosed, EntryConflict, EntryTooLarge
from asynckv.testing.expectations import expect
from asynckv.testing.lookup_checks.values import (
    LOOKUP_MAX_BYTES,
    MIB,
    LookupCheck,
    cancelled,
    empty,
    expect_aborted,
    expect_error,
    fill,
    five_waiting,
    noise,
    same,
    until_waiting,
)

__all__ = (
    "DELIVERING_CHECKS",
    "ROOM_CHECKS",
    "a_cancelled_body_gives_back",
    "a_cancelled_wait_leaves_no_trace",
    "a_direct_delivery_given_back_goes_to_the_next",
    "a_held_entry_cannot_be_withdrawn",
    "a_taken_entry_is_not_waited_for",
    "a_waiting_insert_goes_straight_to_who_selects_it",
    "an_entry_can_be_withdrawn_and_its_end_awaited",
    "an_entry_leaves_after_as_many_deliveries",
    "an_entry_leaves_when_its_time_is_over",
    "an_entry_that_fails_too_often_is_dropped",
    "closing_ends_every_wait",
    "leaving_cleanly_acknowledges_and_an_error_gives_back",
    "tensors_land_where_into_says",
    "the_same_insert_again_changes_nothing",
    "what_could_never_fit_is_refused_at_once",
)


async def leaving_cleanly_acknowledges_and_an_error_gives_back(
    producer: KVLookupBuffer, consumer: KVLookupBuffer, local: LookupBuffer
) -> None:
    """``attempt`` tells a repeated delivery."""
    for nbytes in (64, MIB):
        name = f"of {nbytes}"
        await producer.insert([1], None, noise(nbytes), None, None, entry_id=name)
        try:
            async with consumer.drop_select([1]) as entry:
                expect(await consumer.peek([1]) == 0, "a held entry cannot be had")
                raise LookupError("the application fails")
        except LookupError:
            expect(entry.attempt == 1, entry.attempt)
        async with consumer.drop_select([1]) as entry:
            expect(entry.attempt == 2 and entry.entry_id == name, entry.attempt)
            expect(same(entry.key, noise(nbytes)), "the bytes")
        await producer.taken(name)
        expect(await consumer.peek([1]) == 0, "an acknowledged entry is gone")
    await empty(local)


async def a_cancelled_body_gives_back(
    producer: KVLookupBuffer, consumer: KVLookupBuffer, local: LookupBuffer
) -> None:
    """At once to who waits for it, and it does not count as a failure."""

    async def hold() -> None:
        async with consumer.drop_select([1]):
            held.set()
            await asyncio.get_running_loop().create_future()

    for _ in range(7):
        held = asyncio.Event()
        if not local.statistics().entries:
            await producer.insert([1], None, noise(64), None, None)
        task = asyncio.create_task(hold())
        await held.wait()
        await cancelled(task)
    entry = await consumer.drop_select([1])
    expect(entry.attempt == 8, entry.attempt)
    await empty(local)


async def tensors_land_where_into_says(
    producer: KVLookupBuffer, consumer: KVLookupBuffer, local: LookupBuffer
) -> None:
    """What does not fit is a ``ValueError``, and the entry stays."""
    for nbytes in (64, MIB):
        key = {"0": noise(nbytes), "1": noise(nbytes)}
        await producer.insert([1], None, key, None, noise(8))
        wrong = {"0.key": torch.zeros(nbytes + 1, dtype=torch.uint8)}
        for into in (wrong, {"2.key": noise(4)}):
            await expect_error(
                ValueError, partial(consumer.drop_select, [1], into=into)
            )
        target = torch.zeros(nbytes, dtype=torch.uint8)
        entry = await consumer.drop_select([1], into={"0.key": target})
        expect(isinstance(entry.key, dict) and entry.key["0"] is target, "into")
        expect(same(target, key["0"]), "its bytes")
        expect(same(entry.hidden, noise(8)), "what into does not name")
    await empty(local)


async def an_entry_can_be_withdrawn_and_its_end_awaited(
    producer: KVLookupBuffer, consumer: KVLookupBuffer, local: LookupBuffer
) -> None:
    """``taken`` tells how an entry left."""
    for entry_id in ("acknowledged", "withdrawn"):
        await producer.insert([1], None, None, None, None, entry_id=entry_id)
    waiting = asyncio.create_task(producer.taken("acknowledged"))
    await consumer.drop_select(entry_id="acknowledged")
    await waiting
    await producer.taken("acknowledged")
    expect(await producer.withdraw("withdrawn"), "it was there")
    expect(not await producer.withdraw("withdrawn"), "it is gone")
    await expect_aborted("withdrawn", producer.taken, "withdrawn")
    await expect_error(KeyError, producer.taken, "unknown")
    await empty(local)


async def a_held_entry_cannot_be_withdrawn(
    producer: KVLookupBuffer, consumer: KVLookupBuffer, local: LookupBuffer
) -> None:
    """And its consumer does not notice the attempt."""
    entry_id = await producer.insert([1], None, noise(64), None, None)
    async with consumer.drop_select([1]):
        expect(not await producer.withdraw(entry_id), "it is held")
    await producer.taken(entry_id)
    await empty(local)


async def an_entry_leaves_after_as_many_deliveries(
    producer: KVLookupBuffer, consumer: KVLookupBuffer, local: LookupBuffer
) -> None:
    """Each goes to another consumer: here to both sides."""
    for nbytes in (64, MIB):
        key = noise(nbytes)
        entry_id = await producer.insert([1], None, key, None, None, deliveries=2)
        async with consumer.drop_select([1]) as one, producer.drop_select([1]) as two:
            expect(same(one.key, key) and same(two.key, key), "two copies")
        await producer.taken(entry_id)
    await empty(local)


async def a_taken_entry_is_not_waited_for(
    producer: KVLookupBuffer, consumer: KVLookupBuffer, local: LookupBuffer
) -> None:
    """Who asks for it by its id is told so, at once or when it is taken."""
    await producer.insert([1], None, noise(64), None, None, entry_id="it")
    async with consumer.drop_select(entry_id="it"):
        waiting = asyncio.create_task(producer.drop_select(entry_id="it"))
        await until_waiting(local, selects=1)
    await expect_aborted("taken", lambda: waiting)
    await expect_aborted("taken", partial(consumer.drop_select, entry_id="it"))
    stream = consumer.open_drop_select(entry_id="it")
    await expect_aborted("taken", stream.__aenter__)
    await empty(local)


async def the_same_insert_again_changes_nothing(
    producer: KVLookupBuffer, consumer: KVLookupBuffer, local: LookupBuffer
) -> None:
    """Other contents or other tokens under that id are a conflict."""
    for nbytes in (64, MIB):
        key, name = noise(nbytes), f"of {nbytes}"
        for _ in range(2):
            await producer.insert([1], None, key, None, None, entry_id=name)
        for tokens, other in (([1], key + 1), ([2], key)):
            await expect_error(
                EntryConflict,
                partial(producer.insert, entry_id=name),
                *(tokens, None, other, None, None),
            )
        expect(local.statistics().entries == 1, "one entry")
        await consumer.drop_select([1])
        await producer.taken(name)
        await producer.insert([1], None, key, None, None, entry_id=name)
        expect(local.statistics().entries == 0, "it was acknowledged before")
    await empty(local)


async def an_entry_leaves_when_its_time_is_over(
    producer: KVLookupBuffer, consumer: KVLookupBuffer, local: LookupBuffer
) -> None:
    """Unless somebody holds it."""
    await producer.insert([1], None, noise(64), None, None, ttl_s=0, entry_id="it")
    await expect_aborted("ttl", producer.taken, "it")
    expect(local.statistics().expired == 1, "it is counted")
    await empty(local)


async def an_entry_that_fails_too_often_is_dropped(
    producer: KVLookupBuffer, consumer: KVLookupBuffer, local: LookupBuffer
) -> None:
    """After ``max_deliver`` consumers that had it in hand."""
    entry_id = await producer.insert([1], None, noise(64), None, None)
    for _ in range(5):
        with contextlib.suppress(LookupError):
            async with consumer.drop_select([1]):
                raise LookupError("the application fails")
    await expect_aborted("max_deliver", producer.taken, entry_id)
    expect(local.statistics().undeliverable == 1, "it is counted")
    await empty(local)


DELIVERING_CHECKS: Final[tuple[LookupCheck, ...]] = (
    leaving_cleanly_acknowledges_and_an_error_gives_back,
    a_cancelled_body_gives_back,
    tensors_land_where_into_says,
    an_entry_can_be_withdrawn_and_its_end_awaited,
    a_held_entry_cannot_be_withdrawn,
    an_entry_leaves_after_as_many_deliveries,
    a_taken_entry_is_not_waited_for,
    the_same_insert_again_changes_nothing,
    an_entry_leaves_when_its_time_is_over,
    an_entry_that_fails_too_often_is_dropped,
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
