"""What is stored comes back, under its key."""

from __future__ import annotations

import asyncio
from typing import Final

import torch

from asynckv.abc import KVStoreBuffer
from asynckv.buffers.store import StoreBuffer
from asynckv.errors import BufferClosed
from asynckv.testing.expectations import expect, expect_same, noise
from asynckv.testing.store_checks.values import DTYPES, StoreCheck, large

__all__ = (
    "STORING_CHECKS",
    "a_closed_buffer_refuses",
    "a_reader_never_sees_a_mix",
    "a_value_comes_back_as_it_was_put",
    "a_value_lands_in_into",
    "an_into_that_does_not_fit_is_refused",
    "it_tells_which_keys_it_has",
    "none_deletes",
    "the_last_put_wins",
    "the_tensor_may_be_overwritten_after_a_put",
    "what_was_never_put_is_none",
)


async def a_value_comes_back_as_it_was_put(
    client: KVStoreBuffer, local: StoreBuffer
) -> None:
    """Bytes, dtype and shape, for every kind of tensor, small and large."""
    tensors = [noise(64, seed).view(dtype) for seed, dtype in enumerate(DTYPES)]
    tensors += [noise(64, 1) > 99]
    tensors += [torch.tensor(7), torch.empty(0, 3), large(local)]
    tensors += [noise(32, 1).view(4, 8).t()]
    for tensor in tensors:
        await client.put("key", tensor)
        expect_same(await client.get("key"), tensor)


async def what_was_never_put_is_none(client: KVStoreBuffer, local: StoreBuffer) -> None:
    """A miss is no error, and leaves ``into`` alone."""
    into = torch.ones(3)
    expect(await client.get("key") is None, "a miss is None")
    expect(await client.get("key", into=into) is None, "a miss is None with into")
    expect_same(into, torch.ones(3))


async def none_deletes(client: KVStoreBuffer, local: StoreBuffer) -> None:
    """``put(key, None)`` and ``delete`` forget a key, and may be repeated."""
    for _ in range(2):
        await client.put("key", torch.ones(3))
        await client.put("key", None)
        expect(await client.get("key") is None, "put(key, None) deletes")
    await client.put("key", None)
    await client.put("key", torch.ones(3))
    expect(await client.delete("key"), "delete says that it was there")
    expect(not await client.delete("key"), "delete says that it was not there")
    expect(local.statistics().used_bytes == 0, "its memory is free again")


async def the_last_put_wins(client: KVStoreBuffer, local: StoreBuffer) -> None:
    """A put replaces the value, also by one of another shape."""
    await client.put("key", large(local))
    await client.put("key", torch.arange(5))
    expect_same(await client.get("key"), torch.arange(5))
    expect(local.statistics().keys == 1, "one key")


async def the_tensor_may_be_overwritten_after_a_put(
    client: KVStoreBuffer, local: StoreBuffer
) -> None:
    """What is stored is a copy, and so is what comes out."""
    for value in (torch.ones(3), large(local)):
        expected = value.clone()
        await client.put("key", value)
        value.zero_()
        first = await client.get("key")
        expect_same(first, expected)
        if first is not None:
            first.zero_()
        expect_same(await client.get("key"), expected)


async def a_value_lands_in_into(client: KVStoreBuffer, local: StoreBuffer) -> None:
    """``into`` is filled and returned."""
    for value in (noise(16, 1), large(local)):
        into = torch.zeros_like(value)
        await client.put("key", value)
        expect(await client.get("key", into=into) is into, "into is returned")
        expect_same(into, value)


async def an_into_that_does_not_fit_is_refused(
    client: KVStoreBuffer, local: StoreBuffer
) -> None:
    """Another shape, another dtype, memory with gaps: untouched, and no harm."""
    value = torch.ones(4, 4)
    await client.put("key", value)
    for into in (torch.zeros(16), torch.zeros(4, 4).int(), torch.zeros(4, 8)[:, ::2]):
        try:
            await client.get("key", into=into)
        except ValueError:
            expect(not into.any().item(), "it is untouched")
        else:
            raise AssertionError("an into that does not fit is a ValueError")
    expect_same(await client.get("key"), value)


async def it_tells_which_keys_it_has(client: KVStoreBuffer, local: StoreBuffer) -> None:
    """``contains`` answers in the order of the question."""
    await client.put("a", torch.ones(1))
    await client.put("c", torch.ones(1))
    found = await client.contains(["c", "b", "a", "a"])
    expect(found == (True, False, True, True), f"found {found}")
    expect(await client.contains([]) == (), "nothing asked, nothing told")


async def a_reader_never_sees_a_mix(client: KVStoreBuffer, local: StoreBuffer) -> None:
    """While values are replaced, every ``get`` returns one of them, whole."""
    nbytes = large(local).nbytes

    async def replace() -> None:
        for number in range(8):
            await client.put("key", torch.full((nbytes,), number, dtype=torch.uint8))

    async def read() -> None:
        for _ in range(8):
            value = await client.get("key")
            if value is not None:
                expect(bool((value == value[0]).all()), "the value is a mix")

    await asyncio.gather(replace(), read(), read())


async def a_closed_buffer_refuses(client: KVStoreBuffer, local: StoreBuffer) -> None:
    """Once the local buffer is closed every call says so."""
    await client.put("key", torch.ones(3))
    await local.aclose()
    for call in (
        client.put("key", torch.ones(3)),
        client.get("key"),
        client.delete("key"),
        client.contains(["key"]),
        client.match_prefix(["key"]),
    ):
        try:
            await call
        except BufferClosed:
            continue
        raise AssertionError("a closed buffer raises BufferClosed")


STORING_CHECKS: Final[tuple[StoreCheck, ...]] = (
    a_value_comes_back_as_it_was_put,
    what_was_never_put_is_none,
    none_deletes,
    the_last_put_wins,
    the_tensor_may_be_overwritten_after_a_put,
    a_value_lands_in_into,
    an_into_that_does_not_fit_is_refused,
    it_tells_which_keys_it_has,
    a_reader_never_sees_a_mix,
    a_closed_buffer_refuses,
)
