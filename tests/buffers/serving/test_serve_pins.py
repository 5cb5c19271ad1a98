from __future__ import annotations

import pytest
import torch

from asynckv.buffers.remote.peer import connect
from asynckv.buffers.serve import serve
from asynckv.buffers.store import StoreBuffer
from asynckv.errors import BufferClosed
from asynckv.links.dial import dial
from asynckv.protocol.frames import Pin, Pinned
from asynckv.protocol.transfer_frames import Grant
from asynckv.testing.blocked import until
from harness.link_pairs import Hearer, name_of


async def test_a_hold_costs_its_server_something_until_it_ends() -> None:
    async with StoreBuffer("8MiB") as local, serve("mem://pins", store=local) as server:
        await local.put("a", torch.ones(9))
        async with connect("mem://pins") as peer:
            async with peer.store.pin(["a", "b"]):
                assert server.waiting_bytes > 0
            await until(lambda: not server.waiting_bytes)


async def test_whoever_says_what_does_not_belong_there_holds_nothing_any_more() -> None:
    async with StoreBuffer("8MiB") as local, serve("mem://pins", store=local) as server:
        await local.put("a", torch.ones(9))
        link = await dial(server.url, identity=name_of("peer"))
        hearer = Hearer()
        stream = link.open_stream(hearer, Pin(("a",)))
        assert await hearer.next() == (Pinned((True,)), b"")
        assert local.values._values[("a", None)].readers == 1
        stream.send(Grant(1))
        assert "no Grant belongs here" in str((await hearer.loss()).__cause__)
        await until(lambda: not local.values._values[("a", None)].readers)
        assert not server.waiting_bytes
        await link.aclose()


async def test_a_closed_store_charges_nobody_for_what_it_refuses() -> None:
    async with StoreBuffer("8MiB") as local, serve("mem://pins", store=local) as server:
        async with connect("mem://pins") as peer:
            await local.aclose()
            with pytest.raises(BufferClosed):
                async with peer.store.pin(["a"]):
                    raise AssertionError
            with pytest.raises(BufferClosed):
                await peer.store.get("a")
            assert not server.waiting_bytes
