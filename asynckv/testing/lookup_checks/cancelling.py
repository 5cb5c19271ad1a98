"""Every operation, cancelled at each of its suspensions."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeAlias

import torch

from asynckv.abc import KVLookupBuffer
from asynckv.buffers.lookup import LookupBuffer
from asynckv.errors import EntryAborted
from asynckv.testing.blocked import until
from asynckv.testing.cancellation import CancelMode, Outcome, sweep_cancellation
from asynckv.testing.expectations import CANCEL_MODES, expect
from asynckv.testing.lookup_checks.values import (
    MIB,
    LookupCheck,
    empty,
    noise,
    same,
)
from asynckv.types import TensorSpec

__all__ = (
    "CANCELLING_CHECKS",
    "a_cancelled_borrow_gives_back",
    "a_cancelled_insert_is_in_whole_or_not_at_all",
    "a_cancelled_select_loses_no_entry",
    "a_cancelled_stream_gives_back",
    "a_cancelled_taken_leaves_no_trace",
    "a_cancelled_writer_aborts_or_commits_whole",
)

_SIZES: Final = (1024, 2 * MIB)
_OVERWRITE: Final = 9


_SizedCheck: TypeAlias = Callable[
    [KVLookupBuffer, KVLookupBuffer, LookupBuffer, int], Awaitable[None]
]


def _of_each_size(check: _SizedCheck) -> LookupCheck:
    """Make a check of one that is told how many bytes a tensor has."""

    @functools.wraps(check)
    async def check_all(
        producer: KVLookupBuffer, consumer: KVLookupBuffer, local: LookupBuffer
    ) -> None:
        for nbytes in _SIZES:
            await check(producer, consumer, local, nbytes)

    return check_all


async def _await(consumer: KVLookupBuffer, target: torch.Tensor) -> None:
    await consumer.drop_select([1], into={"key": target})


async def _sweep_delivery(
    operation: Any,
    producer: KVLookupBuffer,
    consumer: KVLookupBuffer,
    local: LookupBuffer,
    nbytes: int,
) -> None:
    async def before() -> None:
        await producer.insert([1], None, noise(nbytes), None, None)

    async def check(k: int, mode: CancelMode, outcome: Outcome[Any]) -> None:
        await _take_if_there(consumer, local, nbytes)
        await empty(local)

    await sweep_cancellation(operation, check, before=before, modes=CANCEL_MODES)


async def _settled(side: KVLookupBuffer, local: LookupBuffer) -> None:
    """Wait until all that ``side`` has asked for is decided."""
    await side.peek([1])  # a round trip: what was sent before has arrived
    entries = local.ledger.table.entries
    await until(lambda: all(e.complete and not e.leases for e in entries.values()))


async def _take_if_there(
    consumer: KVLookupBuffer, local: LookupBuffer, nbytes: int
) -> None:
    """Take what came back; a cancellation too late has left nothing."""
    await _settled(consumer, local)
    if local.statistics().entries:
        entry = await consumer.drop_select([1])
        expect(same(entry.key, noise(nbytes)), "other bytes")


@_of_each_size
async def a_cancelled_insert_is_in_whole_or_not_at_all(
    producer: KVLookupBuffer, consumer: KVLookupBuffer, local: LookupBuffer, nbytes: int
) -> None:
    """The caller overwrites its tensor at once; no entry shows it."""
    numbers = itertools.count()
    original = noise(nbytes)
    key = original.clone()
    name = ""

    async def before() -> None:
        nonlocal name
        key.copy_(original)
        name = f"{nbytes}-{next(numbers)}"

    async def check(k: int, mode: CancelMode, outcome: Outcome[Any]) -> None:
        key.fill_(_OVERWRITE)
        await _settled(producer, local)
        if outcome.cancelled and local.statistics().entries == 0:
            key.copy_(original)
            await producer.insert([1], None, key, None, None, entry_id=name)
        entry = await consumer.drop_select([1])
        expect(same(entry.key, original), "the entry shows the overwrite")
        await empty(local)

    await sweep_cancellation(
        lambda: producer.insert([1], None, key, None, None, entry_id=name),
        check,
        before=before,
        modes=CANCEL_MODES,
    )


@_of_each_size
async def a_cancelled_select_loses_no_entry(
    producer: KVLookupBuffer, consumer: KVLookupBuffer, local: LookupBuffer, nbytes: int
) -> None:
    """With ``into``, which nobody writes to once the call has ended."""
    target = torch.zeros(nbytes, dtype=torch.uint8)

    async def before() -> None:
        if not local.statistics().entries:
            await producer.insert([1], None, noise(nbytes), None, None)

    async def check(k: int, mode: CancelMode, outcome: Outcome[Any]) -> None:
        target.fill_(_OVERWRITE)
        if outcome.cancelled:
            await _take_if_there(consumer, local, nbytes)
        await empty(local)
        expect(bool((target == _OVERWRITE).all()), "into was written to later")

    await sweep_cancellation(
        lambda: _await(consumer, target), check, before=before, modes=CANCEL_MODES
    )


@_of_each_size
async def a_cancelled_borrow_gives_back(
    producer: KVLookupBuffer, consumer: KVLookupBuffer, local: LookupBuffer, nbytes: int
) -> None:
    """Before, inside and on the way out of the body."""

    async def borrow() -> None:
        async with consumer.drop_select([1]) as entry:
            expect(same(entry.key, noise(nbytes)), "the bytes")
            del entry  # an error would keep what may be a view of the buffer's memory
            await producer.peek([1])

    await _sweep_delivery(borrow, producer, consumer, local, nbytes)


@_of_each_size
async def a_cancelled_stream_gives_back(
    producer: KVLookupBuffer, consumer: KVLookupBuffer, local: LookupBuffer, nbytes: int
) -> None:
    """In the iteration and in ``wait_for``."""

    async def read() -> None:
        async with consumer.open_drop_select([1]) as stream:
            async for _, tensor in stream:
                expect(same(tensor, noise(nbytes)), "the bytes")
                del tensor  # as above
            await stream.wait_for("key")

    await _sweep_delivery(read, producer, consumer, local, nbytes)


@_of_each_size
async def a_cancelled_writer_aborts_or_commits_whole(
    producer: KVLookupBuffer, consumer: KVLookupBuffer, local: LookupBuffer, nbytes: int
) -> None:
    """The caller overwrites its tensor at once; no entry shows it."""
    key = noise(nbytes)
    specs = {"key": TensorSpec((nbytes,), "uint8")}

    async def write() -> None:
        async with producer.open_insert([1], None, specs) as writer:
            await writer.put("key", key)

    async def before() -> None:
        key.copy_(noise(nbytes))

    async def check(k: int, mode: CancelMode, outcome: Outcome[Any]) -> None:
        key.fill_(_OVERWRITE)
        await _settled(producer, local)
        await _take_if_there(consumer, local, nbytes)
        await empty(local)

    await sweep_cancellation(write, check, before=before, modes=CANCEL_MODES)


async def a_cancelled_taken_leaves_no_trace(
    producer: KVLookupBuffer, consumer: KVLookupBuffer, local: LookupBuffer
) -> None:
    """And the next call hears of the end all the same."""
    number = itertools.count()
    name = ""

    async def before() -> None:
        nonlocal name
        name = f"taken {next(number)}"
        await producer.insert([1], None, None, None, None, entry_id=name, ttl_s=0)

    async def wait() -> None:
        with contextlib.suppress(EntryAborted):
            await producer.taken(name)

    async def check(k: int, mode: CancelMode, outcome: Outcome[Any]) -> None:
        await wait()
        await empty(local)

    await sweep_cancellation(wait, check, before=before, modes=CANCEL_MODES)


CANCELLING_CHECKS: Final[tuple[LookupCheck, ...]] = (
    a_cancelled_insert_is_in_whole_or_not_at_all,
    a_cancelled_select_loses_no_entry,
    a_cancelled_borrow_gives_back,
    a_cancelled_stream_gives_back,
    a_cancelled_writer_aborts_or_commits_whole,
    a_cancelled_taken_leaves_no_trace,
)
