"""A lookup buffer on one GPU, and a peer of another process on another one."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from asynckv.buffers.lookup import LookupBuffer
from asynckv.testing.blocked import until
from harness.fake_gpus import FakeGpus
from harness.gpu_pairs import GpuPeer, open_gpu_pair

__all__ = ("NcclBuffers", "open_nccl_buffers")


@dataclasses.dataclass(frozen=True)
class NcclBuffers(GpuPeer):
    """``buffer`` is what ``server`` serves."""

    buffer: LookupBuffer

    @property
    def staged_bytes(self) -> int:
        """What the peer has of its GPU for what it sends."""
        return self.puts.staged_bytes

    async def emptied(self) -> None:
        """Wait until nothing is kept on either side."""
        await until(lambda: not self.buffer.statistics().used_bytes)
        await until(lambda: not self.staged_bytes)
        await until(lambda: not self.server.waiting_bytes)

    async def opened(self) -> None:
        """Wait until both sides know that the way is open."""
        await until(lambda: self.is_way_open)


@asynccontextmanager
async def open_nccl_buffers(
    gpus: FakeGpus,
    *,
    their_nccl: int | None = None,
    **options: Any,
) -> AsyncIterator[NcclBuffers]:
    """Open both, on two of ``gpus``; ``options`` are those of ``open_gpu_pair``.

    ``their_nccl`` is the version that the peer has.
    """
    async with open_gpu_pair(gpus, theirs=1, their_nccl=their_nccl, **options) as pair:
        yield NcclBuffers(pair.server, pair.peer, pair.ours, pair.theirs, pair.buffer)
