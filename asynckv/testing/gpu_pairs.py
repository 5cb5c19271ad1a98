"""A lookup buffer on a GPU, and a peer of another process on the same one."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from asynckv.buffers.lookup import LookupBuffer
from asynckv.buffers.remote import Peer, connect
from asynckv.buffers.serve import Server, serve
from asynckv.testing.fake_devices import FakeDevice, fake_device_of
from asynckv.testing.fake_gpus import FakeGpus

__all__ = ("GpuPair", "open_gpu_pair")


@dataclasses.dataclass(frozen=True)
class GpuPair:
    """``buffer`` is on ``ours``, and what ``peer`` receives on ``theirs``."""

    buffer: LookupBuffer
    server: Server
    peer: Peer
    ours: FakeDevice
    theirs: FakeDevice

    @property
    def pinned_bytes(self) -> int:
        """What the peer has of the buffer's memory, though its entry has left."""
        return self.buffer.statistics().pinned_bytes

    @property
    def staged_bytes(self) -> int:
        """What copies of entries take of memory that the peer maps."""
        stage = self.buffer.stage
        return 0 if stage is None else stage.used_bytes

    @property
    def opened(self) -> int:
        """How many allocations the peer's process has open."""
        return len(self.theirs.process.cuda._opened)


@asynccontextmanager
async def open_gpu_pair(
    gpus: FakeGpus,
    *,
    buffer_bytes: int = 16 * 2**20,
    url: str = "",
    theirs: int = 0,
    **options: Any,
) -> AsyncIterator[GpuPair]:
    """Open both, in two fake processes; ``theirs`` is the number of the peer's GPU.

    ``options`` are those of ``connect``, and ``url`` the end of what it is given.
    """
    here = fake_device_of(gpus.process())
    there = fake_device_of(gpus.process(), theirs)
    asked = {"device": there.device, "max_bytes": "16MiB", **options}
    async with (
        LookupBuffer(buffer_bytes, device=here.device, drain_s=0) as buffer,
        serve("tcp://127.0.0.1:0", lookup=buffer) as server,
        connect(server.url + url, **asked) as peer,
    ):
        yield GpuPair(buffer, server, peer, here, there)
