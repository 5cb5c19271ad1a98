"""What every store buffer keeps, local or remote: small checks to run on yours.

Each check gets a fresh pair: the buffer as its client sees it, and the local
buffer behind it (the same object for a local one).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Final, TypeAlias

import torch

from asynckv.abc import KVStoreBuffer
from asynckv.buffers.store import StoreBuffer
from asynckv.errors import BufferClosed, EntryTooLarge
from asynckv.tensors.views import bytes_of
from asynckv.testing.cancellation import CancelMode, Outcome, sweep_cancellation

__all__ = (
    "STORE_CHECKS",
    "MakeStorePair",
    "StoreCheck",
    "a_cancelled_get_leaves_into_alone",
    "a_cancelled_put_stores_all_or_nothing",
    "a_closed_buffer_refuses",
    "a_reader_never_sees_a_mix",
    "a_value_comes_back_as_it_was_put",
    "a_value_lands_in_into",
    "an_into_that_does_not_fit_is_refused",
    "check_store_buffer",
    "it_tells_which_keys_it_has",
    "none_deletes",
    "the_last_put_wins",
    "the_least_recently_used_make_room",
    "the_tensor_may_be_overwritten_after_a_put",
    "what_can_never_fit_is_refused",
    "what_was_never_put_is_none",
)

StoreCheck: TypeAlias = Callable[[KVStoreBuffer, StoreBuffer], Awaitable[None]]

MakeStorePair: TypeAlias = Callable[
    [], AbstractAsyncContextManager[tuple[KVStoreBuffer, StoreBuffer]]
]
"""Opens a pair; the local buffer is empty and has a ``max_bytes`` of about 16 MiB."""

_DTYPES: Final = (
    torch.uint8,
    torch.int64,
    torch.bfloat16,
    torch.float32,
    torch.float8_e4m3fn,
    torch.complex64,
)
_MODES: Final[tuple[CancelMode, ...]] = ("task", "scope", "completion")


async def check_store_buffer(make_pair: MakeStorePair) -> None:
    """Run every check of :data:`STORE_CHECKS`, each on a pair of its own.

    :raises AssertionError: the buffer breaks the contract; a note names the check
    """
    for check in STORE_CHECKS:
        try:
            async with make_pair() as (client, local):
                await check(client, local)
        except Exception as exc:
            exc.add_note(f"in {getattr(check, '__name__', check)}")
            raise


async def a_value_comes_back_as_it_was_put(
    client: KVStoreBuffer, local: StoreBuffer
) -> None:
    """Bytes, dtype and shape, for every kind of tensor, small and large."""
    tensors = [_noise(64, seed).view(dtype) for seed, dtype in enumerate(_DTYPES)]
    tensors += [_noise(64, 1) > 99]
    tensors += [torch.tensor(7), torch.empty(0, 3), _large(local)]
    tensors += [_noise(32, 1).view(4, 8).t()]
    for tensor in tensors:
        await client.put("key", tensor)
        _same(await client.get("key"), tensor)


async def what_was_never_put_is_none(client: KVStoreBuffer, local: StoreBuffer) -> None:
    """A miss is no error, and leaves ``into`` alone."""
    into = torch.ones(3)
    _check(await client.get("key") is None, "a miss is None")
    _check(await client.get("key", into=into) is None, "a miss is None with into")
    _same(into, torch.ones(3))


async def none_deletes(client: KVStoreBuffer, local: StoreBuffer) -> None:
    """``put(key, None)`` and ``delete`` forget a key, and may be repeated."""
    for _ in range(2):
        await client.put("key", torch.ones(3))
        await client.put("key", None)
        _check(await client.get("key") is None, "put(key, None) deletes")
    await client.put("key", None)
    await client.put("key", torch.ones(3))
    _check(await client.delete("key"), "delete says that it was there")
    _check(not await client.delete("key"), "delete says that it was not there")
    _check(local.statistics().used_bytes == 0, "its memory is free again")


async def the_last_put_wins(client: KVStoreBuffer, local: StoreBuffer) -> None:
    """A put replaces the value, also by one of another shape."""
    await client.put("key", _large(local))
    await client.put("key", torch.arange(5))
    _same(await client.get("key"), torch.arange(5))
    _check(local.statistics().keys == 1, "one key")


async def the_tensor_may_be_overwritten_after_a_put(
    client: KVStoreBuffer, local: StoreBuffer
) -> None:
    """What is stored is a copy, and so is what comes out."""
    for value in (torch.ones(3), _large(local)):
        expected = value.clone()
        await client.put("key", value)
        value.zero_()
        first = await client.get("key")
        _same(first, expected)
        if first is not None:
            first.zero_()
        _same(await client.get("key"), expected)


async def a_value_lands_in_into(client: KVStoreBuffer, local: StoreBuffer) -> None:
    """``into`` is filled and returned."""
    for value in (_noise(16, 1), _large(local)):
        into = torch.zeros_like(value)
        await client.put("key", value)
        _check(await client.get("key", into=into) is into, "into is returned")
        _same(into, value)


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
            _check(not into.any().item(), "it is untouched")
        else:
            raise AssertionError("an into that does not fit is a ValueError")
    _same(await client.get("key"), value)


async def it_tells_which_keys_it_has(client: KVStoreBuffer, local: StoreBuffer) -> None:
    """``contains`` answers in the order of the question."""
    await client.put("a", torch.ones(1))
    await client.put("c", torch.ones(1))
    found = await client.contains(["c", "b", "a", "a"])
    _check(found == (True, False, True, True), f"found {found}")
    _check(await client.contains([]) == (), "nothing asked, nothing told")


async def the_least_recently_used_make_room(
    client: KVStoreBuffer, local: StoreBuffer
) -> None:
    """A ``get`` is a use; what is dropped is counted."""
    quarter = local.statistics().max_bytes // 4
    for key in ("a", "b", "c", "d"):
        await client.put(key, _noise(quarter, 1))
    await client.get("a")
    await client.put("e", _noise(2 * quarter, 1))
    found = await client.contains(["a", "b", "c", "d", "e"])
    _check(found == (True, False, False, True, True), f"found {found}")
    _check(local.statistics().evictions == 2, "two were dropped")


async def what_can_never_fit_is_refused(
    client: KVStoreBuffer, local: StoreBuffer
) -> None:
    """At once, and nothing is dropped for it."""
    await client.put("key", torch.ones(3))
    too_large = torch.zeros(local.statistics().max_bytes + 1, dtype=torch.uint8)
    try:
        await client.put("key", too_large)
    except EntryTooLarge as exc:
        _check(exc.nbytes == too_large.nbytes, "it says how much that was")
    else:
        raise AssertionError("what can never fit is EntryTooLarge")
    _same(await client.get("key"), torch.ones(3))


async def a_reader_never_sees_a_mix(client: KVStoreBuffer, local: StoreBuffer) -> None:
    """While values are replaced, every ``get`` returns one of them, whole."""
    nbytes = _large(local).nbytes

    async def replace() -> None:
        for number in range(8):
            await client.put("key", torch.full((nbytes,), number, dtype=torch.uint8))

    async def read() -> None:
        for _ in range(8):
            value = await client.get("key")
            if value is not None:
                _check(bool((value == value[0]).all()), "the value is a mix")

    await asyncio.gather(replace(), read(), read())


async def a_cancelled_put_stores_all_or_nothing(
    client: KVStoreBuffer, local: StoreBuffer
) -> None:
    """Never a mix, and never what the caller writes into the tensor afterwards."""
    old = _large(local)
    for nbytes in (64, old.nbytes):
        await _cancel_puts(client, old, _noise(nbytes, 2))
    await _until_only(local, "key")


async def a_cancelled_get_leaves_into_alone(
    client: KVStoreBuffer, local: StoreBuffer
) -> None:
    """``into`` is the caller's again, and the next ``get`` is as good as ever."""
    for value in (_noise(64, 1), _large(local)):
        await client.put("key", value)
        await _cancel_gets(client, value)
    await _until_only(local, "key")


async def a_closed_buffer_refuses(client: KVStoreBuffer, local: StoreBuffer) -> None:
    """Once the local buffer is closed every call says so."""
    await client.put("key", torch.ones(3))
    await local.aclose()
    for call in (
        client.put("key", torch.ones(3)),
        client.get("key"),
        client.delete("key"),
        client.contains(["key"]),
    ):
        try:
            await call
        except BufferClosed:
            continue
        raise AssertionError("a closed buffer raises BufferClosed")


STORE_CHECKS: Final[tuple[StoreCheck, ...]] = (
    a_value_comes_back_as_it_was_put,
    what_was_never_put_is_none,
    none_deletes,
    the_last_put_wins,
    the_tensor_may_be_overwritten_after_a_put,
    a_value_lands_in_into,
    an_into_that_does_not_fit_is_refused,
    it_tells_which_keys_it_has,
    the_least_recently_used_make_room,
    what_can_never_fit_is_refused,
    a_reader_never_sees_a_mix,
    a_cancelled_put_stores_all_or_nothing,
    a_cancelled_get_leaves_into_alone,
    a_closed_buffer_refuses,
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
        if not outcome.cancelled or not _equal(value, old):
            _same(value, new)

    await sweep_cancellation(
        lambda: client.put("key", source), check, before=before, modes=_MODES
    )


async def _cancel_gets(client: KVStoreBuffer, value: torch.Tensor) -> None:
    into = torch.zeros_like(value)

    async def check(
        k: int, mode: CancelMode, outcome: Outcome[torch.Tensor | None]
    ) -> None:
        into.fill_(9)
        _same(await client.get("key"), value)
        _check(bool((into == 9).all()), "into was written to after the cancellation")

    await sweep_cancellation(lambda: client.get("key", into=into), check, modes=_MODES)


async def _until_only(local: StoreBuffer, key: str) -> None:
    """Wait until nothing but the value of ``key`` is charged to the buffer."""
    value = await local.get(key)
    nbytes = 0 if value is None else value.nbytes
    async with asyncio.timeout(5):
        # The buffer does not tell when memory is free again: nobody else asks.
        while local.statistics().used_bytes != nbytes:  # noqa: ASYNC110
            await asyncio.sleep(0.001)


def _large(local: StoreBuffer) -> torch.Tensor:
    """More than rides with a frame, and little enough that eight of them fit."""
    return _noise(max(2**17, local.statistics().max_bytes // 8), 0)


def _noise(nbytes: int, seed: int) -> torch.Tensor:
    """``nbytes`` of uint8; no run of them is like another."""
    values = torch.arange(seed, seed + nbytes, dtype=torch.int64)
    return ((values * 2654435761) >> 13).to(torch.uint8)


def _equal(found: torch.Tensor | None, expected: torch.Tensor) -> bool:
    if found is None or (found.dtype, found.shape) != (expected.dtype, expected.shape):
        return False
    return bool(bytes_of(found) == bytes_of(expected.contiguous()))


def _same(found: torch.Tensor | None, expected: torch.Tensor) -> None:
    if not _equal(found, expected):
        what = "None" if found is None else f"{found.dtype} {tuple(found.shape)}"
        raise AssertionError(
            f"expected a {expected.dtype} {tuple(expected.shape)} with its bytes, "
            f"found {what}"
        )


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise AssertionError(message)
