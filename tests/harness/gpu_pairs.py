"""A lookup buffer on a GPU, and a peer of another process on that one or another."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from asynckv import LookupBuffer, connect, serve
from asynckv.links.options import Digest
from asynckv.testing import until
from harness.fake_devices import fake_device_of
from harness.fake_gpus import FakeGpus
from harness.gpu_peers import GpuPeer

__all__ = ("GpuPair", "open_gpu_pair")


@dataclasses.dataclass(frozen=True)
class GpuPair(GpuPeer):
    """``buffer`` is what ``server`` serves."""

    buffer: LookupBuffer

    @property
    def pinned_bytes(self) -> int:
        """What the peer has of the buffer's memory, though its entry has left."""
        return self.buffer.statistics().pinned_bytes

    @property
    def opened(self) -> int:
        """How many allocations the peer's process has open."""
        return len(self.theirs.process.cuda._opened)

    async def emptied(self) -> None:
        """Wait until nothing is kept on either side."""
        await until(lambda: not self.buffer.statistics().used_bytes)
        await until(lambda: not self.puts.staged_bytes)
        await until(lambda: not self.server.waiting_bytes)


@asynccontextmanager
async def open_gpu_pair(
    gpus: FakeGpus,
    *,
    buffer_bytes: int = 16 * 2**20,
    url: str = "",
    serves: Digest = "auto",
    theirs: int = 0,
    their_nccl: int | None = None,
    **options: Any,
) -> AsyncIterator[GpuPair]:
    """Open both, in two fake processes; ``theirs`` is the number of the peer's GPU.

    ``options`` are those of ``connect``, ``url`` the end of what it is given, and
    ``serves`` the server's digest. ``their_nccl`` is the version that the peer has.
    """
    here = fake_device_of(gpus.process())
    there = fake_device_of(gpus.process(), theirs)
    if their_nccl is not None:
        there.process.nccl.number = their_nccl
    asked = {"device": there.device, "max_bytes": "16MiB", **options}
    async with (
        LookupBuffer(buffer_bytes, device=here.device, drain_s=0) as buffer,
        serve("tcp://127.0.0.1:0", lookup=buffer, digest=serves) as server,
        connect(server.url + url, **asked) as peer,
    ):
        yield GpuPair(server, peer, here, there, buffer)
