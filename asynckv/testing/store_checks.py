"""What every store buffer keeps, local or remote: small checks to run on yours.

Each check gets a fresh pair: the buffer as its client sees it, and the local
buffer behind it (the same object for a local one).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Final, TypeAlias

import torch

from asynckv.abc import KVStoreBuffer
from asynckv.buffers.store import StoreBuffer
from asynckv.errors import BufferClosed, EntryTooLarge
from asynckv.testing.blocked import until
from asynckv.testing.cancellation import CancelMode, Outcome, sweep_cancellation
from asynckv.testing.expectations import (
    CANCEL_MODES,
    expect,
    expect_error,
    expect_same,
    is_same,
    naming,
    noise,
)
from asynckv.types import TensorSpec

__all__ = (
    "CANCELLING_CHECKS",
    "DTYPES",
    "ROOM_CHECKS",
    "STORE_CHECKS",
    "STORING_CHECKS",
    "MakeStorePair",
    "StoreCheck",
    "a_cancelled_get_leaves_into_alone",
    "a_cancelled_put_stores_all_or_nothing",
    "a_clear_forgets_all_and_says_how_much",
    "a_closed_buffer_refuses",
    "a_prefix_ends_at_the_first_gap",
    "a_reader_never_sees_a_mix",
    "a_stat_says_what_is_there",
    "a_value_comes_back_as_it_was_put",
    "a_value_is_gone_when_its_time_is_over",
    "a_value_lands_in_into",
    "an_into_that_does_not_fit_is_refused",
    "check_store_buffer",
    "it_tells_which_keys_it_has",
    "large",
    "many_are_put_and_got_at_once",
    "none_deletes",
    "the_last_put_wins",
    "the_least_recently_used_make_room",
    "the_tensor_may_be_overwritten_after_a_put",
    "until_only",
    "what_can_never_fit_is_refused",
    "what_is_pinned_is_not_dropped_for_room",
    "what_was_never_put_is_none",
)


StoreCheck: TypeAlias = Callable[[KVStoreBuffer, StoreBuffer], Awaitable[None]]
"""Called with the client's side and the local buffer."""

DTYPES: Final = (
    torch.uint8,
    torch.int64,
    torch.bfloat16,
    torch.float32,
    torch.float8_e4m3fn,
    torch.complex64,
)


def large(local: StoreBuffer) -> torch.Tensor:
    """More than rides with a frame, and little enough that eight of them fit."""
    return noise(max(2**17, local.statistics().max_bytes // 8), 0)


async def until_only(local: StoreBuffer, key: str) -> None:
    """Wait until nothing but the value of ``key`` is charged to the buffer.

    :raises TimeoutError: something else stays
    """
    value = await local.get(key)
    nbytes = 0 if value is None else value.nbytes
    await until(lambda: local.statistics().used_bytes == nbytes)


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


async def a_clear_forgets_all_and_says_how_much(
    client: KVStoreBuffer, local: StoreBuffer
) -> None:
    """What is put with pin, too; what is held goes when it is let go."""
    await client.put_many([(str(number), noise(64, 1)) for number in range(600)])
    await client.put("pinned", large(local), pin=True)
    async with client.pin(["0"]) as held:
        count = await client.clear()
        expect(count == 601 and held == (True,), f"{count} values were cleared")
        expect(local.statistics().keys == 0, "there are keys")
        expect(await client.get("0") is None, "what is held is found")
        await client.put("0", torch.ones(3))
    await until_only(local, "0")
    expect_same(await client.get("0"), torch.ones(3))
    expect(await client.clear() == 1, "what was put after that is cleared by the next")
    expect(await client.clear() == 0, "there is nothing to clear")
    await until(lambda: local.statistics().used_bytes == 0)


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
        await expect_error(ValueError, client.get("key", into=into))
        expect(not into.any().item(), "it is untouched")
    expect_same(await client.get("key"), value)


async def it_tells_which_keys_it_has(client: KVStoreBuffer, local: StoreBuffer) -> None:
    """``contains`` answers in the order of the question; one key is no sequence."""
    await client.put("a", torch.ones(1))
    await client.put("c", torch.ones(1))
    found = await client.contains(["c", "b", "a", "a"])
    expect(found == (True, False, True, True), f"found {found}")
    expect(await client.contains([]) == (), "nothing asked, nothing told")
    for call in (client.contains, client.get_many, lambda keys: _pin(client, keys)):
        await expect_error(TypeError, call("abc"))


async def _pin(client: KVStoreBuffer, keys: Sequence[str]) -> None:
    """Hold values, and let them go at once."""
    async with client.pin(keys):
        pass


async def many_are_put_and_got_at_once(
    client: KVStoreBuffer, local: StoreBuffer
) -> None:
    """As one by one, in their order; what could never fit takes nothing from others."""
    values = {f"key {number}": noise(64 + number, number) for number in range(40)}
    nbytes = 2 * local.statistics().max_bytes
    too_large = torch.empty(1, dtype=torch.uint8).expand(nbytes)
    items = [*values.items(), ("too large", too_large)]
    stored = await client.put_many(items)
    expect(stored == (True,) * 40 + (False,), f"stored {stored}")
    into = torch.zeros_like(values["key 1"])
    places = [into if key == "key 1" else None for key in [*values, "nothing"]]
    found = await client.get_many([*values, "nothing"], places)
    for value, expected in zip(found, values.values(), strict=False):
        expect_same(value, expected)
    expect(found[1] is into and found[-1] is None, "into is returned, a miss is None")
    expect(await client.get_many([]) == (), "nothing asked, nothing told")
    for wrong in ([into], [into] * 42):
        await expect_error(ValueError, client.get_many([*values, "nothing"], wrong))


async def a_stat_says_what_is_there(client: KVStoreBuffer, local: StoreBuffer) -> None:
    """Its spec, how long it stays, and where; it is no use of the value."""
    await client.put("a", torch.ones(2, 3), ttl_s=600, pin=True)
    await client.put("b", torch.ones(4))
    first, second = await client.stat("a"), await client.stat("b")
    if first is None or second is None:
        raise AssertionError("what is there has a stat")
    expect(first.tiers[:1] == second.tiers[:1] == ("memory",), "they are in memory")
    expect(first.spec == TensorSpec((2, 3), "float32"), f"it is {first.spec}")
    expect(first.is_pinned and not second.is_pinned, "one was put with pin")
    expect(590 < (first.ttl_s or 0) <= 600, f"it stays for {first.ttl_s} s")
    expect(second.ttl_s is None, "the other one stays")
    expect(await client.stat("c") is None, "what is not there has none")


async def a_prefix_ends_at_the_first_gap(
    client: KVStoreBuffer, local: StoreBuffer
) -> None:
    """``match_prefix`` counts blocks, also those of a long prompt, and says where.

    ``pin`` holds no more than these of a prefix.
    """
    keys = [f"{number:064}" for number in range(1500)]
    await client.put_many([(key, torch.ones(1)) for key in keys if key != keys[1200]])
    match = await client.match_prefix(keys)
    expect(match == match.ready == 1200, f"{match} blocks, {match.ready} ready")
    expect(match.by_tier == {"memory": 1200}, f"they are in {match.by_tier}")
    expect(await client.match_prefix([]) == 0, "nothing of nothing")
    async with client.pin(keys, prefix=True) as found:
        expect(found == (*[True] * 1200, *[False] * 300), f"found {sum(found)}")
    async with client.pin(keys) as found:
        expect(sum(found) == 1499, f"found {sum(found)}, with those after the gap")


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


async def a_value_is_gone_when_its_time_is_over(
    client: KVStoreBuffer, local: StoreBuffer
) -> None:
    """``ttl_s`` counts from the put, a later put counts anew, and 0 is refused."""
    await client.put("short", torch.ones(3), ttl_s=0.01)
    await client.put("long", torch.ones(3), ttl_s=600)
    await asyncio.sleep(0.02)  # there is nothing to wait for but the clock
    expect(await client.get("short") is None, "it is found after its time")
    expect(await client.contains(["short"]) == (False,), "it is there after its time")
    expect_same(await client.get("long"), torch.ones(3))
    await client.put("short", torch.ones(3))
    expect_same(await client.get("short"), torch.ones(3))
    for ttl_s in (0.0, -1.0, float("nan")):
        await expect_error(ValueError, client.put("key", torch.ones(3), ttl_s=ttl_s))


async def a_closed_buffer_refuses(client: KVStoreBuffer, local: StoreBuffer) -> None:
    """Once the local buffer is closed every call says so."""
    await client.put("key", torch.ones(3))
    await local.aclose()
    for call in (
        client.put("key", torch.ones(3)),
        client.get("key"),
        client.delete("key"),
        client.clear(),
        client.contains(["key"]),
        client.match_prefix(["key"]),
        client.stat("key"),
        client.get_many(["key"]),
        client.put_many([("key", torch.ones(3))]),
    ):
        await expect_error(BufferClosed, call)


STORING_CHECKS: Final[tuple[StoreCheck, ...]] = (
    a_value_comes_back_as_it_was_put,
    what_was_never_put_is_none,
    none_deletes,
    a_clear_forgets_all_and_says_how_much,
    the_last_put_wins,
    the_tensor_may_be_overwritten_after_a_put,
    a_value_lands_in_into,
    an_into_that_does_not_fit_is_refused,
    it_tells_which_keys_it_has,
    many_are_put_and_got_at_once,
    a_stat_says_what_is_there,
    a_prefix_ends_at_the_first_gap,
    a_reader_never_sees_a_mix,
    a_value_is_gone_when_its_time_is_over,
    a_closed_buffer_refuses,
)


async def the_least_recently_used_make_room(
    client: KVStoreBuffer, local: StoreBuffer
) -> None:
    """A ``get`` is a use; what is dropped is counted."""
    quarter = local.statistics().max_bytes // 4
    for key in ("a", "b", "c", "d"):
        await client.put(key, noise(quarter, 1))
    await client.get("a")
    await client.put("e", noise(2 * quarter, 1))
    found = await client.contains(["a", "b", "c", "d", "e"])
    expect(found == (True, False, False, True, True), f"found {found}")
    expect(local.statistics().evictions == 2, "two were dropped")


async def what_is_pinned_is_not_dropped_for_room(
    client: KVStoreBuffer, local: StoreBuffer
) -> None:
    """It goes when it is deleted, or when a value takes its place."""
    half = local.statistics().max_bytes // 2
    await client.put("pinned", noise(half, 1), pin=True)
    for key in ("a", "b"):
        await client.put(key, noise(half, 2))
    found = await client.contains(["pinned", "a", "b"])
    expect(found == (True, False, True), f"found {found}")
    await client.put("pinned", noise(2 * half, 3), pin=True)
    expect_same(await client.get("pinned"), noise(2 * half, 3))
    expect(await client.delete("pinned"), "it is deleted")
    await client.put("a", noise(2 * half, 4))


async def what_can_never_fit_is_refused(
    client: KVStoreBuffer, local: StoreBuffer
) -> None:
    """At once, and nothing is dropped for it."""
    await client.put("key", torch.ones(3))
    too_large = torch.zeros(local.statistics().max_bytes + 1, dtype=torch.uint8)
    error = await expect_error(EntryTooLarge, client.put("key", too_large))
    expect(error.nbytes == too_large.nbytes, "it says how much that was")
    expect_same(await client.get("key"), torch.ones(3))


ROOM_CHECKS: Final[tuple[StoreCheck, ...]] = (
    the_least_recently_used_make_room,
    what_is_pinned_is_not_dropped_for_room,
    what_can_never_fit_is_refused,
)


async def a_cancelled_put_stores_all_or_nothing(
    client: KVStoreBuffer, local: StoreBuffer
) -> None:
    """Never a mix, and never what the caller writes into the tensor afterwards."""
    old = large(local)
    for nbytes in (64, old.nbytes):
        await _cancel_puts(client, old, noise(nbytes, 2))
    await until_only(local, "key")


async def a_cancelled_get_leaves_into_alone(
    client: KVStoreBuffer, local: StoreBuffer
) -> None:
    """``into`` is the caller's again, and the next ``get`` is as good as ever."""
    for value in (noise(64, 1), large(local)):
        await client.put("key", value)
        await _cancel_gets(client, value)
    await until_only(local, "key")


CANCELLING_CHECKS: Final[tuple[StoreCheck, ...]] = (
    a_cancelled_put_stores_all_or_nothing,
    a_cancelled_get_leaves_into_alone,
)


async def _cancel_puts(
    client: KVStoreBuffer, old: torch.Tensor, new: torch.Tensor
) -> None:
    source = new.clone()

    async def before() -> None:
        await client.put("key", old)
        source.copy_(new)

    async def check(k: int, mode: CancelMode, outcome: Outcome[None]) -> None:
        source.fill_(0)
        value = await client.get("key")
        if not outcome.cancelled or not is_same(value, old):
            expect_same(value, new)

    await sweep_cancellation(
        lambda: client.put("key", source), check, before=before, modes=CANCEL_MODES
    )


async def _cancel_gets(client: KVStoreBuffer, value: torch.Tensor) -> None:
    into = torch.zeros_like(value)

    async def check(
        k: int, mode: CancelMode, outcome: Outcome[torch.Tensor | None]
    ) -> None:
        into.fill_(9)
        expect_same(await client.get("key"), value)
        expect(bool((into == 9).all()), "into was written to after the cancellation")

    await sweep_cancellation(
        lambda: client.get("key", into=into), check, modes=CANCEL_MODES
    )


MakeStorePair: TypeAlias = Callable[
    [], AbstractAsyncContextManager[tuple[KVStoreBuffer, StoreBuffer]]
]
"""Opens a pair; the local buffer is empty and has a ``max_bytes`` of about 16 MiB."""

STORE_CHECKS: Final[tuple[StoreCheck, ...]] = (
    *STORING_CHECKS,
    *ROOM_CHECKS,
    *CANCELLING_CHECKS,
)


async def check_store_buffer(make_pair: MakeStorePair) -> None:
    """Run every check of :data:`STORE_CHECKS`, each on a pair of its own.

    :raises AssertionError: the buffer breaks the contract; a note names the check
    """
    for check in STORE_CHECKS:
        with naming(check):
            async with make_pair() as (client, local):
                await check(client, local)
