"""A store buffer on a GPU, and a peer of another process on that one or another."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from asynckv.buffers.remote import connect
from asynckv.buffers.serve import serve
from asynckv.buffers.store import StoreBuffer
from asynckv.testing.blocked import until
from asynckv.testing.fake_devices import fake_device_of
from asynckv.testing.fake_gpus import FakeGpus
from asynckv.testing.gpu_peers import GpuPeer

__all__ = ("GpuStores", "open_gpu_stores")

_STORE_BYTES = 16 * 2**20


@dataclasses.dataclass(frozen=True)
class GpuStores(GpuPeer):
    """``store`` is what ``server`` serves."""

    store: StoreBuffer

    @property
    def pinned_bytes(self) -> int:
        """What the peer has of the store's memory, though its value is gone."""
        return self.store.statistics().pinned_bytes

    async def opened(self) -> None:
        """Wait until the server knows too that a way between two GPUs is open."""
        await until(lambda: self.is_way_open)


@asynccontextmanager
async def open_gpu_stores(
    gpus: FakeGpus, *, url: str = "", theirs: int = 0, **options: Any
) -> AsyncIterator[GpuStores]:
    """Open both; ``theirs`` is the number of the peer's GPU: by 0 it is the same.

    ``options`` are those of ``connect``, and ``url`` the end of what it is given. A
    peer without a device has tensors on ``theirs`` all the same.
    """
    here = fake_device_of(gpus.process())
    there = fake_device_of(gpus.process(), theirs)
    asked = {"device": there.device, "max_bytes": _STORE_BYTES, **options}
    async with (
        StoreBuffer(_STORE_BYTES, device=here.device) as store,
        serve("tcp://127.0.0.1:0", store=store) as server,
        connect(server.url + url, **asked) as peer,
    ):
        if asked["device"] is None:
            peer.pool.stagings = there.stagings()
        yield GpuStores(server, peer, here, there, store)
