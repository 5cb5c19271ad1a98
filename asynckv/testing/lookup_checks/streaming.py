"""Entries that come and go tensor by tensor."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Final

import torch

from asynckv.abc import KVLookupBuffer
from asynckv.buffers.lookup import LookupBuffer
from asynckv.errors import EntryConflict
from asynckv.testing.blocked import until, until_blocked
from asynckv.testing.expectations import expect
from asynckv.testing.lookup_checks.values import (
    MIB,
    LookupCheck,
    empty,
    expect_aborted,
    expect_error,
    fill,
    noise,
    same,
    until_waiting,
)
from asynckv.types import TensorSpec

__all__ = (
    "STREAMING_CHECKS",
    "a_failed_stream_goes_to_the_next_from_its_first_tensor",
    "a_plain_select_waits_for_the_end_of_a_stream",
    "a_stream_without_room_goes_straight_to_its_consumer",
    "a_whole_entry_can_be_streamed_out",
    "a_writer_refuses_what_was_not_declared",
    "a_writer_that_fails_aborts_its_entry",
    "a_writer_waits_for_another_under_its_id",
    "leaving_early_acknowledges",
    "tensors_come_in_landing_order_while_the_writer_writes",
)


def _specs(nbytes: int = 64) -> dict[str, TensorSpec]:
    names = ("0.key", "0.value", "hidden")
    return {name: TensorSpec((nbytes,), "uint8") for name in names}


async def tensors_come_in_landing_order_while_the_writer_writes(
    producer: KVLookupBuffer, consumer: KVLookupBuffer, local: LookupBuffer
) -> None:
    """Small and large ones; ``wait_for`` and the iteration may mix."""
    for nbytes in (64, MIB):
        target = torch.zeros(nbytes, dtype=torch.uint8)
        async with producer.open_insert([1, 2], None, _specs(nbytes)) as writer:
            await writer.put("hidden", noise(nbytes, 1))
            async with consumer.open_drop_select([1], into={"0.key": target}) as stream:
                expect(stream.attempt == 1 and stream.matched_tokens == 1, "the lease")
                expect(stream.entry_id == writer.entry_id, stream.entry_id)
                expect(dict(stream.specs) == _specs(nbytes), stream.specs)
                name, tensor = await anext(stream)
                expect(name == "hidden" and same(tensor, noise(nbytes, 1)), name)
                await writer.put("0.value", noise(nbytes, 2))
                await writer.put("0.key", noise(nbytes, 3))
                expect(await stream.wait_for("0.key") is target, "into")
                expect(same(target, noise(nbytes, 3)), "its bytes")
                await expect_error(KeyError, stream.wait_for, "1.key")
                rest = [(await anext(stream))[0] for _ in range(2)]
                expect(sorted(rest) == ["0.key", "0.value"], rest)
    await empty(local)


async def a_whole_entry_can_be_streamed_out(
    producer: KVLookupBuffer, consumer: KVLookupBuffer, local: LookupBuffer
) -> None:
    """By the same names, however it was inserted; once it was left it gives nothing."""
    for nbytes in (64, MIB):
        value = {"a": noise(nbytes, 1)}
        await producer.insert([1], None, noise(nbytes), value, None)
        async with consumer.open_drop_select([1]) as stream:
            tensors = {name: tensor async for name, tensor in stream}
        await expect_error(RuntimeError, stream.__anext__)
        expect(sorted(tensors) == ["a.value", "key"], list(tensors))
        expect(same(tensors["a.value"], value["a"]), "its bytes")
    await empty(local)


async def a_plain_select_waits_for_the_end_of_a_stream(
    producer: KVLookupBuffer, consumer: KVLookupBuffer, local: LookupBuffer
) -> None:
    """And goes back to waiting if the writer fails."""
    select = asyncio.create_task(consumer.drop_select([1]))
    await until_waiting(local, selects=1)
    try:
        async with producer.open_insert([1], None, _specs()) as writer:
            await until(lambda: local.statistics().leased == 1)
            await writer.put("0.key", noise(64))
            raise LookupError("the prefill fails")
    except LookupError:
        await until_waiting(local, selects=1)
    expect(not select.done(), "it waits again")
    async with producer.open_insert([1], None, _specs()) as writer:
        for name in _specs():
            await writer.put(name, noise(64))
        expect(not select.done(), "it waits for the end")
    entry = await select
    expect(same(entry.hidden, noise(64)) and entry.attempt == 1, entry.attempt)
    await empty(local)


async def a_writer_that_fails_aborts_its_entry(
    producer: KVLookupBuffer, consumer: KVLookupBuffer, local: LookupBuffer
) -> None:
    """Its streams end with ``EntryAborted``, and the entry is gone."""
    entered = asyncio.Event()

    async def read() -> None:
        async with consumer.open_drop_select([1]) as stream:
            async for _ in stream:
                entered.set()

    async def write() -> None:
        async with producer.open_insert([1], None, _specs(), entry_id="it") as writer:
            await writer.put("0.key", noise(64))
            await entered.wait()

    reader = asyncio.create_task(read())
    await expect_error(ValueError, write)
    await expect_aborted("producer", asyncio.wait_for, reader, 10)
    expect(await consumer.peek([1]) == 0, "it is gone")
    await expect_aborted("producer", producer.taken, "it")
    await empty(local)


async def a_writer_refuses_what_was_not_declared(
    producer: KVLookupBuffer, consumer: KVLookupBuffer, local: LookupBuffer
) -> None:
    """Unknown, repeated, or of another shape or dtype; it can go on after that.

    Once it was left it takes nothing more.
    """
    async with producer.open_insert([1], None, _specs()) as writer:
        await writer.put("0.key", noise(64))
        for name, wrong in (
            ("1.key", noise(64)),
            ("0.key", noise(64)),
            ("0.value", noise(63)),
            ("0.value", noise(64).view(torch.int8)),
        ):
            await expect_error(ValueError, writer.put, name, wrong)
        await writer.put("0.value", noise(64))
        await writer.put("hidden", noise(64))
    await expect_error(RuntimeError, writer.put, "hidden", noise(64))
    await consumer.drop_select([1])
    await empty(local)


async def leaving_early_acknowledges(
    producer: KVLookupBuffer, consumer: KVLookupBuffer, local: LookupBuffer
) -> None:
    """The writer may go on, in vain, and leaves without an error."""
    for nbytes in (64, MIB):
        async with producer.open_insert([1], None, _specs(nbytes)) as writer:
            await writer.put("0.key", noise(nbytes))
            async with consumer.open_drop_select([1]) as stream:
                await stream.wait_for("0.key")
            await until(lambda: not local.statistics().entries)
            await writer.put("0.value", noise(nbytes))
            await writer.put("hidden", noise(nbytes))
        await producer.taken(writer.entry_id)
    await empty(local)


async def a_failed_stream_goes_to_the_next_from_its_first_tensor(
    producer: KVLookupBuffer, consumer: KVLookupBuffer, local: LookupBuffer
) -> None:
    """Also while the writer still writes."""
    for nbytes in (64, MIB):
        async with producer.open_insert([1], None, _specs(nbytes)) as writer:
            await writer.put("hidden", noise(nbytes, 1))
            try:
                async with consumer.open_drop_select([1]) as stream:
                    await anext(stream)
                    raise LookupError("the application fails")
            except LookupError:
                await writer.put("0.key", noise(nbytes, 2))
            async with consumer.open_drop_select([1]) as stream:
                expect(stream.attempt == 2, stream.attempt)
                again = dict([await anext(stream), await anext(stream)])
                expect(same(again["hidden"], noise(nbytes, 1)), "tensor 0")
                expect(same(again["0.key"], noise(nbytes, 2)), "tensor 1")
                await writer.put("0.value", noise(nbytes, 3))
                last, _ = await anext(stream)
                expect(last == "0.value", last)
    await empty(local)


async def a_stream_without_room_goes_straight_to_its_consumer(
    producer: KVLookupBuffer, consumer: KVLookupBuffer, local: LookupBuffer
) -> None:
    """Given back it stays, and moves in when there is room."""
    await fill(producer)
    reading = asyncio.create_task(_read_and_fail(consumer))
    await until_waiting(local, selects=1)
    async with producer.open_insert([1], None, _specs(MIB)) as writer:
        for name in _specs():
            await writer.put(name, noise(MIB))
        await asyncio.wait({reading})
        expect(local.statistics().outside_bytes > 3 * MIB, "it is outside")
        await consumer.drop_select([0])
    expect(local.statistics().outside_bytes == 0, "it moved in")
    entry = await consumer.drop_select([1])
    expect(entry.attempt == 2 and same(entry.hidden, noise(MIB)), entry.attempt)
    await empty(local)


async def a_writer_waits_for_another_under_its_id(
    producer: KVLookupBuffer, consumer: KVLookupBuffer, local: LookupBuffer
) -> None:
    """And writes if that one failed; other calls go on meanwhile."""

    async def write() -> None:
        async with producer.open_insert([1], None, {}, entry_id="it"):
            pass

    first = producer.open_insert([1], None, _specs(), entry_id="it")
    await first.__aenter__()
    again = asyncio.create_task(write())
    await until_blocked(again)
    expect(await producer.peek([2]) == 0, "nothing is there")
    expect(not again.done(), "the first one is under way")
    await first.__aexit__(LookupError, LookupError(), None)
    await again
    await expect_error(EntryConflict, write)
    expect((await consumer.drop_select([1])).key is None, "the second one's")
    await empty(local)


async def _read_and_fail(consumer: KVLookupBuffer) -> None:
    with contextlib.suppress(LookupError):
        async with consumer.open_drop_select([1]) as stream:
            await stream.wait_for("hidden")
            raise LookupError("the application fails")


STREAMING_CHECKS: Final[tuple[LookupCheck, ...]] = (
    tensors_come_in_landing_order_while_the_writer_writes,
    a_whole_entry_can_be_streamed_out,
    a_plain_select_waits_for_the_end_of_a_stream,
    a_writer_that_fails_aborts_its_entry,
    a_writer_refuses_what_was_not_declared,
    leaving_early_acknowledges,
    a_failed_stream_goes_to_the_next_from_its_first_tensor,
    a_stream_without_room_goes_straight_to_its_consumer,
    a_writer_waits_for_another_under_its_id,
)
