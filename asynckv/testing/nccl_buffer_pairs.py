"""A lookup buffer on one GPU, and a peer of another process on another one."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from asynckv.buffers.lookup import LookupBuffer
from asynckv.buffers.remote import Peer, connect
from asynckv.buffers.serve import Server, serve
from asynckv.links.gpu_link import GpuLink
from asynckv.links.options import Digest
from asynckv.tensors.paged_arena import PagedArena
from asynckv.testing.blocked import until
from asynckv.testing.fake_devices import FakeDevice, fake_device_of
from asynckv.testing.fake_gpus import FakeGpus

__all__ = ("NcclBuffers", "open_nccl_buffers")


@dataclasses.dataclass(frozen=True)
class NcclBuffers:
    """``buffer`` is on ``ours``, and what ``peer`` receives on ``theirs``."""

    buffer: LookupBuffer
    server: Server
    peer: Peer
    ours: FakeDevice
    theirs: FakeDevice

    @property
    def way(self) -> GpuLink:
        """The server's end of what connects both GPUs."""
        (services,) = [s for s in self.server._services if not s.is_lost]
        if services.devices.way is None:
            raise LookupError("nothing connects both GPUs")
        return services.devices.way

    @property
    def near_way(self) -> GpuLink:
        """The peer's end of it."""
        if (way := self.peer.way(self.peer._linked())) is None:
            raise LookupError("nothing connects both GPUs")
        return way

    @property
    def has_moved(self) -> bool:
        """Whether anything has gone from GPU to GPU."""
        return self.way.transport.sender._sending._next > 0

    @property
    def has_put(self) -> bool:
        """Whether anything has gone there from the peer's GPU."""
        return self.near_way.transport.sender._sending._next > 0

    @property
    def staged_bytes(self) -> int:
        """What the peer has of its GPU for what it sends."""
        arena = (self.peer.on_gpu or self.peer.memory).arena
        if isinstance(arena, PagedArena):
            arena.collect()
        return arena.used_bytes + arena.pinned_bytes

    async def emptied(self) -> None:
        """Wait until nothing is kept on either side."""
        await until(lambda: not self.buffer.statistics().used_bytes)
        await until(lambda: not self.staged_bytes)
        await until(lambda: not self.server.waiting_bytes)

    async def opened(self) -> None:
        """Wait until both sides know that the way is open."""
        await until(lambda: self.way.is_open)


@asynccontextmanager
async def open_nccl_buffers(
    gpus: FakeGpus,
    *,
    url: str = "",
    serves: Digest = "auto",
    their_nccl: int | None = None,
    buffer_bytes: int = 16 * 2**20,
    **options: Any,
) -> AsyncIterator[NcclBuffers]:
    """Open both, on two of ``gpus``; ``options`` are those of ``connect``.

    ``url`` is the end of the URL that is connected to, ``serves`` the server's digest,
    ``their_nccl`` the version that the peer has.
    """
    ours, theirs = fake_device_of(gpus.process()), fake_device_of(gpus.process(), 1)
    if their_nccl is not None:
        theirs.process.nccl.number = their_nccl
    asked = {"device": theirs.device, "max_bytes": "16MiB", **options}
    async with (
        LookupBuffer(buffer_bytes, device=ours.device, drain_s=0) as buffer,
        serve("tcp://127.0.0.1:0", lookup=buffer, digest=serves) as server,
        connect(server.url + url, **asked) as peer,
    ):
        yield NcclBuffers(buffer, server, peer, ours, theirs)
