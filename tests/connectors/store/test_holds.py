from __future__ import annotations

import asyncio

import pytest
import torch

from asynckv.buffers.store import StoreBuffer
from asynckv.connectors.store.lookup import StorePins
from asynckv.errors import PeerLost
from asynckv.testing.blocked import until


async def fill(store: StoreBuffer) -> None:
    """Put so much that all that can be dropped is."""
    for number in range(40):
        await store.put(f"filler {number}", torch.zeros(2**17, dtype=torch.uint8))


async def test_what_is_held_is_not_evicted_and_what_is_let_go_is() -> None:
    holds = StorePins(3600, 8)
    async with StoreBuffer("2MiB") as store:
        await store.put("a", torch.zeros(2**17, dtype=torch.uint8))
        assert await holds.hold(store, ["a", "b"]) == (True, False)
        await fill(store)
        assert await store.contains(["a"]) == (True,)
        await holds.release()
        await fill(store)
        assert await store.contains(["a"]) == (False,)
        assert await holds.hold(store, ["a"]) == (False,)
        await holds.aclose()
        assert not len(holds)
        with pytest.raises(PeerLost):
            await holds.hold(store, ["a"])


async def test_it_holds_so_many_at_once_and_for_so_long() -> None:
    async with StoreBuffer() as store:
        holds = StorePins(3600, 2)
        for _ in range(5):
            await holds.hold(store, ["a"])
            await asyncio.sleep(0)
        assert len(holds) <= 2
        holds.abort()
        await holds.aclose()
        short = StorePins(0, 2)
        await short.hold(store, ["a"])
        await until(lambda: not len(short))
