"""A server's process, as its parent starts and stops it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import asynckv
from asynckv.abc import KVStoreBuffer
from asynckv.cli.demo.cache.server import main
from asynckv.cli.demo.messages import Ready, Stored, WaitStored
from asynckv.cli.demo.processes import Worker, WorkerFailed


async def is_on_disk(store: KVStoreBuffer, key: str) -> bool:
    stored = await store.stat(key)
    return stored is not None and "disk" in stored.tiers


@pytest.mark.multiprocess
async def test_a_server_has_a_disk_and_takes_no_orders(tmp_path: Path) -> None:
    arguments = "tcp://127.0.0.1:0", str(2**20), f"disk://{tmp_path}?max=4MiB"
    server = await Worker.start(main.__module__, *arguments, progress=lambda _: None)
    try:
        ready = await server.expect(Ready)
        async with asynckv.connect(ready.url) as peer:
            await peer.store.put("a", torch.ones(9))
            # Each round is a round trip: there is nothing else to wait for.
            while not await is_on_disk(peer.store, "a"):
                pass
        with pytest.raises(WorkerFailed, match="does not know WaitStored"):
            await server.ask(WaitStored("disk"), Stored)
    finally:
        await server.stop()
