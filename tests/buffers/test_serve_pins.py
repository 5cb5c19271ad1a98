from __future__ import annotations

import torch

from asynckv.buffers.remote import connect
from asynckv.buffers.serve import serve
from asynckv.buffers.store import StoreBuffer
from asynckv.testing.blocked import until


async def test_a_hold_costs_its_server_something_until_it_ends() -> None:
    async with StoreBuffer("8MiB") as local, serve("mem://pins", store=local) as server:
        await local.put("a", torch.ones(9))
        async with connect("mem://pins") as peer:
            async with peer.store.pin(["a", "b"]):
                assert server.waiting_bytes > 0
            await until(lambda: not server.waiting_bytes)
