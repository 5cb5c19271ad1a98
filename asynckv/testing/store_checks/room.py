"""What makes room, and what never fits."""

from __future__ import annotations

from typing import Final

import torch

from asynckv.abc import KVStoreBuffer
from asynckv.buffers.store import StoreBuffer
from asynckv.errors import EntryTooLarge
from asynckv.testing.expectations import expect, expect_same, noise
from asynckv.testing.store_checks.values import StoreCheck

__all__ = (
    "ROOM_CHECKS",
    "the_least_recently_used_make_room",
    "what_can_never_fit_is_refused",
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


async def what_can_never_fit_is_refused(
    client: KVStoreBuffer, local: StoreBuffer
) -> None:
    """At once, and nothing is dropped for it."""
    await client.put("key", torch.ones(3))
    too_large = torch.zeros(local.statistics().max_bytes + 1, dtype=torch.uint8)
    try:
        await client.put("key", too_large)
    except EntryTooLarge as exc:
        expect(exc.nbytes == too_large.nbytes, "it says how much that was")
    else:
        raise AssertionError("what can never fit is EntryTooLarge")
    expect_same(await client.get("key"), torch.ones(3))


ROOM_CHECKS: Final[tuple[StoreCheck, ...]] = (
    the_least_recently_used_make_room,
    what_can_never_fit_is_refused,
)
