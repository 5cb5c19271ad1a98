"""A server's process, as its parent starts and stops it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import asynckv
from asynckv.abc import KVStoreBuffer
from asynckv.cli.demo.messages import Ready, Stored, WaitStored
from asynckv.cli.demo.processes import Worker, WorkerFailed

SERVER = "asynckv.cli.demo.cache.server"


async def start(url: str, folder: Path) -> tuple[Worker, str]:
    arguments = url, str(2**20), f"disk://{folder}?max=4MiB"
    server = await Worker.start(SERVER, *arguments, progress=lambda _: None)
    return server, (await server.expect(Ready)).url


async def until_on_disk(store: KVStoreBuffer, key: str) -> None:
    while (told := await store.stat(key)) is None or "disk" not in told.tiers:
        pass  # each round is a round trip


@pytest.mark.multiprocess
@pytest.mark.slow
async def test_what_a_killed_server_had_on_disk_is_served_by_the_next(
    tmp_path: Path,
) -> None:
    server, url = await start("tcp://127.0.0.1:0", tmp_path)
    async with asynckv.connect(url) as peer:
        await peer.store.put("a", torch.ones(9))
        await until_on_disk(peer.store, "a")
        server.kill()
        await server.stop()
        server, again = await start(url, tmp_path)
        assert again == url
        assert torch.equal(torch.ones(9), await got(peer.store, "a"))
    with pytest.raises(WorkerFailed, match="does not know WaitStored"):
        await server.ask(WaitStored("disk"), Stored)
    await server.stop()


async def got(store: KVStoreBuffer, key: str) -> torch.Tensor:
    """Return a value that a store that was just opened may still be looking for."""
    while (value := await store.get(key)) is None:
        pass
    return value
