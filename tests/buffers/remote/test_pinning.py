from __future__ import annotations

import pytest
import torch

from asynckv.abc import KVStoreBuffer
from asynckv.buffers.remote.peer import connect
from asynckv.buffers.serve import serve
from asynckv.buffers.store import StoreBuffer
from asynckv.errors import LeaseLost, Overloaded
from asynckv.testing.blocked import until

MIB = 2**20


async def fill(client: KVStoreBuffer, count: int) -> None:
    for number in range(count):
        await client.put(f"filler {number}", torch.ones(MIB, dtype=torch.uint8))


async def test_what_is_pinned_is_not_dropped_for_room() -> None:
    async with StoreBuffer("8MiB") as local, serve("mem://pin", store=local):
        async with connect("mem://pin") as peer:
            for client in (local, peer.store):
                await client.put("a", torch.ones(MIB, dtype=torch.uint8))
                async with client.pin(["a", "b"]) as found:
                    assert found == (True, False)
                    await fill(client, 9)
                    assert await client.contains(["a"]) == (True,)
                await until(lambda: not local.values._values[("a", None)].readers)
                await fill(client, 9)
                assert await client.contains(["a"]) == (False,)


async def test_a_hold_ends_with_its_link() -> None:
    async with StoreBuffer("8MiB") as local, serve("mem://pin", store=local):
        await local.put("a", torch.ones(9))
        async with connect("mem://pin", reconnect_s=0) as peer:
            with pytest.raises(LeaseLost):
                async with peer.store.pin(["a"]):
                    peer.abort()
                    await until(lambda: not peer.is_connected)
                    await until(lambda: not local.values._values[("a", None)].readers)


async def test_a_hold_that_is_refused_holds_nothing() -> None:
    async with (
        StoreBuffer("8MiB") as local,
        serve("mem://pin", store=local, max_waiting_bytes=8192) as server,
        connect("mem://pin") as peer,
    ):
        await local.put("a", torch.ones(9))
        async with peer.store.pin(["a"]):
            with pytest.raises(Overloaded):
                async with peer.store.pin(["a", "b"]):
                    raise AssertionError
            assert local.values._values[("a", None)].readers == 1
        await until(lambda: not server.waiting_bytes)
        assert not local.values._values[("a", None)].readers


async def test_a_prefix_ends_at_the_first_key_that_is_missing() -> None:
    async with StoreBuffer("8MiB") as local, serve("mem://pin", store=local):
        async with connect("mem://pin") as peer:
            for key in "abd":
                await local.put(key, torch.ones(1))
            for client in (local, peer.store):
                assert await client.match_prefix(list("abcd")) == 2
                assert await client.match_prefix(["a", "b"]) == 2
                assert await client.match_prefix([]) == 0
                with pytest.raises(TypeError):
                    await client.contains("abc")
                with pytest.raises(TypeError):
                    async with client.pin("abc"):
                        pass
