"""A lookup buffer on a GPU, and a peer of another process on that one or another."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from asynckv import LookupBuffer, Peer, Server, connect, serve
from asynckv.buffers.serving.devices import DeviceService
from asynckv.links.options import Digest
from asynckv.sharing.gpu_channel import GpuLink
from asynckv.testing import until
from harness.fake_devices import FakeDevice, fake_device_of
from harness.fake_gpus import FakeGpus
from harness.shared_puts import SharedPuts

__all__ = (
    "GpuPair",
    "GpuPeer",
    "open_gpu_pair",
)


@dataclasses.dataclass(frozen=True)
class GpuPeer:
    """What is served is on ``ours``, and what ``peer`` has on ``theirs``."""

    server: Server
    peer: Peer
    ours: FakeDevice
    theirs: FakeDevice

    @property
    def way(self) -> GpuLink:
        """The server's end of what connects two GPUs.

        :raises LookupError: nothing does
        """
        return _present(self._far_way)

    @property
    def near_way(self) -> GpuLink:
        """The peer's end of it.

        :raises LookupError: nothing does
        """
        return _present(self._near_way)

    @property
    def is_way_open(self) -> bool:
        """Does the server know too that it is open?"""
        way = self._far_way
        return way is not None and way.is_open

    @property
    def has_moved(self) -> bool:
        """Whether anything has gone from the served GPU to the peer's."""
        return _has_sent(self._far_way)

    @property
    def has_put(self) -> bool:
        """Whether anything has gone from the peer's GPU, or was shown there."""
        if self.puts.are_read:
            return self.puts.has_shown
        return _has_sent(self._near_way)

    @property
    def puts(self) -> SharedPuts:
        """What the peer puts from."""
        return SharedPuts(self.peer)

    @property
    def devices(self) -> DeviceService:
        """What connects the served GPU with the peer's.

        :raises LookupError: no lookup buffer is served
        """
        (services,) = [s for s in self.server._services if not s.is_lost]
        if services.devices is None:
            raise LookupError("no lookup buffer is served")
        return services.devices

    @property
    def _far_way(self) -> GpuLink | None:
        return self.devices.way

    @property
    def _near_way(self) -> GpuLink | None:
        return self.peer.routes.nccl(self.peer._linked())


def _present(way: GpuLink | None) -> GpuLink:
    if way is None:
        raise LookupError("nothing connects two GPUs")
    return way


def _has_sent(way: GpuLink | None) -> bool:
    return way is not None and way.transport.sender._sending._next > 0


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
