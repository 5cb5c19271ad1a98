"""The serving side of one peer's wish to connect its GPU with that of the buffers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from asynckv.buffers.host_copies import HostCopies
from asynckv.buffers.lookup import LookupBuffer
from asynckv.buffers.peer_sources import PeerSources
from asynckv.buffers.sent_parts import PartsOnGpu
from asynckv.errors import AsyncKVError, ConfigError, RemoteProtocolError
from asynckv.links.device_streams import DeviceStream
from asynckv.links.gpu_arrivals import GpuArrivals
from asynckv.links.gpu_link import GpuLink
from asynckv.links.link import Link
from asynckv.links.requests import LinkStream, StreamHandler
from asynckv.links.sharing import MapDigest
from asynckv.protocol.device_frames import Devices, OpenDevices
from asynckv.protocol.frames import OpeningFrame
from asynckv.protocol.ipc_frames import ShowIpc
from asynckv.tensors.device_copying import DeviceCopyPool
from asynckv.tensors.devices import Device

__all__ = ("DeviceService",)

logger = logging.getLogger(__name__)


class DeviceService:
    """Connects the GPU of ``buffer`` with that of one link's peer, once it asks.

    ``way`` is what connects them from then on, for whatever is sent from here, or
    inserted; ``copies`` are in host memory, for what goes another way. ``digest`` is
    what this side wants to be compared of what goes there.

    ``sources`` are what a peer on the same GPU inserts from, and a ``map_digest`` is
    compared of.
    """

    def __init__(
        self,
        buffer: LookupBuffer,
        link: Link,
        digest: MapDigest,
        *,
        may_use_nccl: bool,
        map_digest: MapDigest = "edges",
    ) -> None:
        self.link = link
        self.sources = PeerSources(buffer, link, map_digest)
        self.way: GpuLink | None = None
        self.copies = HostCopies()
        self._buffer = buffer
        self._digest: MapDigest = digest
        self._may_use_nccl = may_use_nccl
        self._tasks: set[asyncio.Task[None]] = set()
        self._was_asked = False
        self._call_ended: Callable[[], None] = lambda: None

    def open(
        self, stream: LinkStream, frame: OpeningFrame, body: bytes
    ) -> StreamHandler | None:
        """Begin to open the other end of what the peer opens; return what hears of it.

        Or open what it shows of its own.

        :raises ConfigError: this side has no GPU, or is to use none
        :raises RemoteProtocolError: the peer has asked before
        """
        if isinstance(frame, ShowIpc) and self._may_use_nccl:
            return self.sources.open(stream, frame)
        if not isinstance(frame, OpenDevices):
            return None
        if self._was_asked:
            raise RemoteProtocolError("a link connects GPUs once")
        self._was_asked = True
        device = self._buffer.open_device
        if device is None or not self._may_use_nccl:
            raise ConfigError("this side has no GPU to send from")
        channel = DeviceStream(answers=True)
        channel.use(stream)
        loop = asyncio.get_running_loop()
        opening = self._open(channel, frame, device)
        task = loop.create_task(opening, name="asynckv: connect GPUs")
        self._tasks.add(task)
        task.add_done_callback(self._task_ended)
        return channel

    def arrivals(self, *, on_gpu: bool) -> PartsOnGpu | None:
        """Return by what one transfer may come into memory of the buffer's GPU.

        By NCCL, if it lies ``on_gpu`` there.

        What is kept has the digest of all its bytes, unless the link has none: an
        entry is known again by it.
        """
        way, pool = self.way, self._buffer.pool
        if not isinstance(pool, DeviceCopyPool):
            return None
        if (shared := self.sources.arrivals(pool)) is not None:
            return shared
        if way is None or not way.is_open or not on_gpu:
            return None
        return GpuArrivals(way, pool, "off" if self.link.digest == "off" else "full")

    @property
    def has_ended(self) -> bool:
        """No task of this peer is left."""
        return not self._tasks

    def call_when_ended(self, callback: Callable[[], None]) -> None:
        """Call back when the last task of this peer has ended."""
        self._call_ended = callback

    def leave(self) -> None:
        """What connects the GPUs serves what is under way; it ends with the link."""

    async def wait_idle(self) -> None:
        """Wait while the peer's GPU waits for this one. Cancelling leaves no trace."""
        way = self.way
        if way is not None and way.is_opening:
            opened = asyncio.Event()
            way.call_when_opened(opened.set)
            await opened.wait()

    def abort(self) -> None:
        """End what is under way. Never waits."""
        for task in self._tasks:
            task.cancel()

    async def wait_ended(self) -> None:
        """Wait until the GPU has let go, about 1 s at most."""
        if self._tasks:
            await asyncio.wait(set(self._tasks))
        if self.way is not None:
            await self.way.aclose()
        await self.sources.aclose()

    async def _open(
        self, channel: DeviceStream, asked: OpenDevices, device: Device
    ) -> None:
        way = None
        try:
            way = await GpuLink.make(self.link, device, self._digest)
            channel.send(Devices(way.transport.describe()))
            self.way = way
            await way.open(way.transport.open(asked.description, channel))
        except (AsyncKVError, OSError, TimeoutError) as exc:
            logger.info("no way from GPU to GPU to %s: %s", self.link.peer.id, exc)
            channel.refuse(exc)
        if way is not None:
            await way.closed()  # until then the buffers' memory may be sent from

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._call_ended()
