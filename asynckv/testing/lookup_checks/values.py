"""What the checks share: bytes to send, and how to say what was expected."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final, TypeAlias, TypeVar

import numpy
import torch

from asynckv.abc import KVLookupBuffer
from asynckv.buffers.lookup import LookupBuffer
from asynckv.errors import EntryAborted
from asynckv.testing.blocked import until, until_blocked
from asynckv.testing.expectations import expect, is_same

__all__ = (
    "DTYPES",
    "LOOKUP_MAX_BYTES",
    "MIB",
    "LookupCheck",
    "borrow",
    "cancelled",
    "empty",
    "expect_aborted",
    "expect_error",
    "fill",
    "five_waiting",
    "insert",
    "noise",
    "same",
    "started",
    "until_waiting",
)

_E = TypeVar("_E", bound=BaseException)
_R = TypeVar("_R")

LookupCheck: TypeAlias = Callable[
    [KVLookupBuffer, KVLookupBuffer, LookupBuffer], Awaitable[None]
]
"""Called with the producer's side, the consumer's side and the local buffer."""

MIB: Final = 2**20
LOOKUP_MAX_BYTES: Final = 4 * MIB

DTYPES: Final = (
    torch.bool,
    torch.uint8,
    torch.int64,
    torch.bfloat16,
    torch.float32,
    torch.float8_e4m3fn,
    torch.complex64,
)


def noise(nbytes: int, seed: int = 0) -> torch.Tensor:
    """Return ``nbytes`` zeros and ones (any dtype holds them), the same each time."""
    noise = numpy.random.default_rng(seed).bytes(nbytes)
    return torch.from_numpy(numpy.frombuffer(noise, numpy.uint8) & 1)


def same(found: object, expected: torch.Tensor | None) -> bool:
    """Whether bytes, dtype and shape are those expected."""
    if expected is None or not isinstance(found, torch.Tensor):
        return found is expected
    return is_same(found, expected)


async def expect_error(
    kind: type[_E], operation: Callable[..., Awaitable[object]], *args: Any
) -> _E:
    """Return the error that ``operation(*args)`` ends with.

    :raises AssertionError: it does not fail
    """
    try:
        await operation(*args)
    except kind as exc:
        return exc
    raise AssertionError(f"no {kind.__name__}")


async def expect_aborted(
    reason: str, operation: Callable[..., Awaitable[object]], *args: Any
) -> None:
    """Let ``operation(*args)`` be told that the entry left for that reason.

    :raises AssertionError: it does not fail, or the reason is another one
    """
    error = await expect_error(EntryAborted, operation, *args)
    expect(error.reason == reason, error.reason)


async def insert(
    lookup: KVLookupBuffer, token: int, nbytes: int = 64, **options: Any
) -> str:
    """Insert so much noise under one token; ``options`` are those of an insert."""
    return await lookup.insert([token], None, noise(nbytes), None, None, **options)


async def borrow(
    lookup: KVLookupBuffer, token: int, leave: asyncio.Event, error: bool = False
) -> None:
    """Borrow what has that token until ``leave`` is set.

    :raises LookupError: ``error`` is true: that is how the borrow is left
    """
    async with lookup.drop_select([token]):
        await leave.wait()
        if error:
            raise LookupError("the application fails")


async def fill(producer: KVLookupBuffer) -> None:
    """Leave less than 1 MiB of room; the tokens of what takes it are ``[0]``."""
    await insert(producer, 0, LOOKUP_MAX_BYTES - MIB // 2)


async def five_waiting(
    producer: KVLookupBuffer, local: LookupBuffer
) -> list[asyncio.Task[str]]:
    """Let five inserts of 1 MiB wait for room: ids "1" to "5", tokens likewise."""
    tasks = []
    for number in range(1, 6):
        insert = producer.insert(
            [number], None, noise(MIB, number), None, None, entry_id=str(number)
        )
        tasks.append(asyncio.create_task(insert))
        await until_waiting(local, inserts=number)
    return tasks


async def until_waiting(
    local: LookupBuffer, *, inserts: int = 0, selects: int = 0
) -> None:
    """Wait until so many inserts wait for room, and selects for a match."""

    def is_so() -> bool:
        now = local.statistics()
        return (now.waiting_inserts, now.waiting_selects) == (inserts, selects)

    await until(is_so)


async def empty(local: LookupBuffer, *, timeout_s: float = 5.0) -> None:
    """Wait until the buffer holds nothing, for nobody.

    :raises AssertionError: it goes on holding something
    """

    def is_empty() -> bool:
        now = local.statistics()
        held = (now.used_bytes, now.outside_bytes, now.entries, now.leased)
        return not any((*held, now.waiting_inserts, now.waiting_selects))

    try:
        await until(is_empty, timeout_s=timeout_s)
    except TimeoutError:
        raise AssertionError(f"not empty: {local.statistics()}") from None


async def started(call: Coroutine[Any, Any, _R]) -> asyncio.Task[_R]:
    """Begin a call, and return its task when that waits or has ended."""
    task = asyncio.create_task(call)
    await until_blocked(task)
    return task


async def cancelled(task: asyncio.Task[Any]) -> None:
    """Cancel a task and wait for its end.

    :raises AssertionError: it ends in another way
    """
    task.cancel()
    await asyncio.wait({task})
    expect(task.cancelled(), task)
