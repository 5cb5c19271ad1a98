"""Which entry a query gets, and which query an entry."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Final

import torch

from asynckv.abc import KVLookupBuffer
from asynckv.buffers.lookup import LookupBuffer
from asynckv.testing.expectations import expect
from asynckv.testing.lookup_checks.values import (
    DTYPES,
    MIB,
    LookupCheck,
    cancelled,
    empty,
    expect_error,
    noise,
    same,
    until_waiting,
)

__all__ = (
    "SELECTING_CHECKS",
    "a_query_says_how_much_must_match",
    "an_entry_comes_back_as_it_was_inserted",
    "every_kind_of_tensor_survives",
    "ids_are_compared_exactly",
    "inserted_tensors_may_be_overwritten",
    "nothing_happens_before_it_is_used_and_only_once",
    "tensors_to_compute_into_are_inserted_like_any",
    "the_longest_match_wins_then_the_first_in",
    "who_has_waited_longest_is_served_first",
    "wrong_arguments_are_value_errors",
)


async def an_entry_comes_back_as_it_was_inserted(
    producer: KVLookupBuffer, consumer: KVLookupBuffer, local: LookupBuffer
) -> None:
    """Five fields, extras, layers by name, and what tells deliveries apart."""
    for nbytes in (64, MIB):
        key, value = noise(nbytes), {"0": noise(8), "a.b": noise(nbytes // 2)}
        hidden, extras = noise(24), {"logits.1": noise(5)}
        entry_id = await producer.insert(
            [1, 2, 3], [1, 0, 1], key, value, hidden, extras=extras
        )
        entry = await consumer.drop_select([1, 3, 9])
        expect(entry.entry_id == entry_id and entry.attempt == 1, entry)
        expect(entry.matched_tokens == 2, "the match has two tokens")
        tokens, roi, *_ = entry
        expect(same(tokens, torch.tensor([1, 2, 3])), tokens)
        expect(same(roi, torch.tensor([1, 0, 1])), roi)
        expect(same(entry.key, key) and same(entry.hidden, hidden), "key, hidden")
        layers = dict(entry.value) if isinstance(entry.value, Mapping) else {}
        expect(list(layers) == ["0", "a.b"], list(layers))
        expect(same(layers["a.b"], value["a.b"]), "a layer's value")
        expect(same(entry.extras["logits.1"], extras["logits.1"]), "extras")
    await empty(local)


async def every_kind_of_tensor_survives(
    producer: KVLookupBuffer, consumer: KVLookupBuffer, local: LookupBuffer
) -> None:
    """Dtypes, strides, 0-d and empty; and nothing but tokens is an entry too."""
    tensors = {str(d): noise(64).view(d) for d in DTYPES}
    tensors["0-d"] = torch.tensor(2.5, dtype=torch.float64)
    tensors["empty"] = torch.empty(0, 3, dtype=torch.int16)
    tensors["strided"] = torch.arange(60).reshape(6, 10)[::2, 1::3].T
    await producer.insert([1], None, None, None, None, extras=tensors)
    entry = await consumer.drop_select([1])
    for name, tensor in tensors.items():
        expect(same(entry.extras[name], tensor), name)
    await producer.insert([1], None, None, None, None)
    expect((await consumer.drop_select([1])).nbytes == 8, "tokens alone")
    await empty(local)


async def inserted_tensors_may_be_overwritten(
    producer: KVLookupBuffer, consumer: KVLookupBuffer, local: LookupBuffer
) -> None:
    """Also the tokens: an entry is a copy."""
    for nbytes in (64, MIB):
        tokens, key = torch.tensor([1, 2]), torch.zeros(nbytes, dtype=torch.uint8)
        await producer.insert(tokens, None, key, None, None)
        tokens.fill_(9)
        key.fill_(9)
        entry = await consumer.drop_select([1, 2])
        expect(same(entry.key, torch.zeros_like(key)), "an overwrite is in the entry")
    await empty(local)


async def tensors_to_compute_into_are_inserted_like_any(
    producer: KVLookupBuffer, consumer: KVLookupBuffer, local: LookupBuffer
) -> None:
    """Small and large, once and again, twice in an entry, or a part of one."""
    for size in (8, MIB // 8):
        key = producer.empty((2, size // 2), torch.int64)
        expect((key.shape, key.dtype) == ((2, size // 2), torch.int64), key.shape)
        key.copy_(torch.arange(size).view(2, -1))
        for value in (None, key, key[1:], key.T):
            await producer.insert([1], None, key, value, None)
            entry = await consumer.drop_select([1])
            expect(same(entry.key, key) and same(entry.value, value), size)
    del key, value, entry
    await empty(local)


async def the_longest_match_wins_then_the_first_in(
    producer: KVLookupBuffer, consumer: KVLookupBuffer, local: LookupBuffer
) -> None:
    """Whether the query or the entry is the longer one."""
    for entry_id, tokens in {
        "short": [1],
        "first": [1, 2, 3],
        "second": [1, 2, 3],
        "longer": [1, 2, 3, 4],
        "other": [1, 2, 9],
    }.items():
        await producer.insert(tokens, None, None, None, None, entry_id=entry_id)
    query = [1, 2, 3]
    order = [(await consumer.drop_select(query)).entry_id for _ in range(4)]
    expect(order == ["first", "second", "longer", "short"], order)
    expect((await consumer.drop_select()).entry_id == "other", "any entry")
    await empty(local)


async def a_query_says_how_much_must_match(
    producer: KVLookupBuffer, consumer: KVLookupBuffer, local: LookupBuffer
) -> None:
    """``min_matched_tokens``, ``match="exact"`` and ``entry_id``."""
    for entry_id, tokens in {"a": [1, 2], "b": [1, 2, 3], "c": [1, 2, 3, 4]}.items():
        await producer.insert(tokens, None, None, None, None, entry_id=entry_id)
    exact = await consumer.drop_select([1, 2, 3, 4], match="exact")
    expect(exact.entry_id == "c", exact.entry_id)
    many = await consumer.drop_select([1, 2, 3, 5], min_matched_tokens=3)
    expect(many.entry_id == "b" and many.matched_tokens == 3, many.entry_id)
    named = await consumer.drop_select(entry_id="a")
    expect(named.entry_id == "a" and named.matched_tokens == 0, named.entry_id)
    await empty(local)


async def ids_are_compared_exactly(
    producer: KVLookupBuffer, consumer: KVLookupBuffer, local: LookupBuffer
) -> None:
    """Across dtypes, and without a tolerance: 128000 is not 128001."""
    await producer.insert([128000, 7], None, None, None, None)
    expect(await consumer.peek([128001, 7]) == 0, "a wrong hit")
    for dtype in (torch.int32, torch.int64, torch.uint32):
        query = torch.tensor([0, 128000, 7]).to(dtype)
        roi = torch.tensor([False, True, True])
        expect(await consumer.peek(query, roi) == 2, dtype)
    await consumer.drop_select(torch.tensor([128000, 7], dtype=torch.int32))
    await empty(local)


async def wrong_arguments_are_value_errors(
    producer: KVLookupBuffer, consumer: KVLookupBuffer, local: LookupBuffer
) -> None:
    """A roi without tokens, of another length, or with more than 0 and 1."""
    for tokens, roi in ((None, [1]), ([1, 2], [1]), ([1, 2], [1, 2]), ([1], [0.5])):
        rest = (None, None, None)
        await expect_error(ValueError, producer.insert, tokens, roi, *rest)
        await expect_error(ValueError, consumer.drop_select, tokens, roi)
        await expect_error(ValueError, consumer.peek, tokens, roi)
    await empty(local)


async def who_has_waited_longest_is_served_first(
    producer: KVLookupBuffer, consumer: KVLookupBuffer, local: LookupBuffer
) -> None:
    """Of all that match; the others go on waiting."""
    queries: tuple[list[int] | None, ...] = ([2], [1, 2, 3], None, [1])
    tasks = []
    for count, query in enumerate(queries, 1):
        tasks.append(asyncio.create_task(consumer.drop_select(query)))
        await until_waiting(local, selects=count)
    for entry_id in "xyz":
        await producer.insert([1, 2], None, None, None, None, entry_id=entry_id)
    served = [(await task).entry_id for task in tasks[1:]]
    expect(served == ["x", "y", "z"], served)
    expect(not tasks[0].done(), "nothing matched [2]")
    await cancelled(tasks[0])
    await until_waiting(local)
    await empty(local)


async def nothing_happens_before_it_is_used_and_only_once(
    producer: KVLookupBuffer, consumer: KVLookupBuffer, local: LookupBuffer
) -> None:
    """And every way to run a coroutine takes it."""
    await producer.insert([1], None, None, None, None, entry_id="one")
    pending = consumer.drop_select([1])
    expect(await consumer.peek([1]) == 1, "it was selected too early")
    expect((await pending).entry_id == "one", "the entry")
    await expect_error(RuntimeError, lambda: pending)
    await expect_error(RuntimeError, pending.__aenter__)
    for _ in range(3):
        await producer.insert([1], None, None, None, None)
    await asyncio.gather(consumer.drop_select([1]))
    await asyncio.wait_for(consumer.drop_select([1]), 10)
    async with asyncio.TaskGroup() as group:
        group.create_task(consumer.drop_select([1]))
    consumer.drop_select([1]).close()
    await empty(local)


SELECTING_CHECKS: Final[tuple[LookupCheck, ...]] = (
    an_entry_comes_back_as_it_was_inserted,
    every_kind_of_tensor_survives,
    inserted_tensors_may_be_overwritten,
    tensors_to_compute_into_are_inserted_like_any,
    the_longest_match_wins_then_the_first_in,
    a_query_says_how_much_must_match,
    ids_are_compared_exactly,
    wrong_arguments_are_value_errors,
    who_has_waited_longest_is_served_first,
    nothing_happens_before_it_is_used_and_only_once,
)
