"""Buffers on a GPU, and a peer of another process on that one or another."""

from __future__ import annotations

import dataclasses

from asynckv import Peer, Server
from asynckv.buffers.serving.devices import DeviceService
from asynckv.sharing.gpu_channel import GpuLink
from harness.fake_devices import FakeDevice
from harness.shared_puts import SharedPuts

__all__ = ("GpuPeer",)


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
