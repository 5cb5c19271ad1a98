"""What a buffer's side does for a peer's GPU.

A peer may wish to connect its GPU with that of the buffers, or to open a buffer's
memory; and the buffer's side opens memory of a GPU that a peer inserts from. What is
inserted is copied from there on the GPU. Where that fails, what was on its way is asked
for once more through host memory, as is all that follows.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final, TypeAlias

from asynckv.buffers.in_memory import InMemoryBuffer
from asynckv.buffers.lookup import LookupBuffer
from asynckv.buffers.serving.service import Service
from asynckv.errors import AsyncKVError, ConfigError, PeerLost, RemoteProtocolError
from asynckv.links.device_streams import DeviceStream
from asynckv.links.gpu_link import GpuArrivals, GpuLink
from asynckv.links.link import Link
from asynckv.links.requests import LinkStream, StreamHandler
from asynckv.protocol.failures import to_failure
from asynckv.protocol.frames import Accepted, Cancel, Cancelled, Frame, OpeningFrame
from asynckv.protocol.handshake import strictest
from asynckv.protocol.transfer_frames import (
    Devices,
    Exported,
    Imported,
    Mappable,
    Mapped,
    OpenDevices,
    OpenIpc,
    OpenMap,
    ShowIpc,
)
from asynckv.sharing.exports import open_export
from asynckv.sharing.imports import PeerMemory
from asynckv.sharing.owner import MapDigest, MapHolder, Sharing
from asynckv.tensors.device_copying import DeviceCopyPool
from asynckv.tensors.device_pages import DeviceAllocation
from asynckv.tensors.devices import Device
from asynckv.transfers.host_copies import HostCopies
from asynckv.transfers.incoming import PartsOnGpu
from asynckv.transfers.ipc_route import IpcArrivals

__all__ = (
    "DeviceService",
    "OpensMemory",
    "PeerSources",
    "Showing",
)


logger = logging.getLogger(__name__)

_OPEN_S: Final = 10.0


class PeerSources:
    """What one link's peer has shown, for ``buffer`` if it is on that GPU.

    ``digest`` is what this side wants to be compared of what is read there.
    """

    def __init__(self, buffer: InMemoryBuffer, link: Link, digest: MapDigest) -> None:
        self._buffer = buffer
        self._link = link
        self._digest: MapDigest = digest
        self._memory = PeerMemory(self._lost)
        self._uuid = ""
        self._is_open = False
        self._was_asked = False
        self._opening: asyncio.Task[None] | None = None

    def open(self, stream: LinkStream, frame: ShowIpc) -> _Opening:
        """Answer the wish; what is returned hears what is shown.

        :raises ConfigError: nothing that the peer shows is read
        :raises RemoteProtocolError: it has asked so before
        """
        link = self._link
        if self._was_asked:
            raise RemoteProtocolError("a link shows memory to put from once")
        self._was_asked = True
        # As with what this side shows: only processes of one host read each other's.
        is_here = link.may_map and link.own_host == link.peer_host
        if not is_here or self._own(frame.uuid) is None:
            raise ConfigError("this side reads no memory of that GPU")
        link.call_when_lost(lambda _: self.close())
        return _Opening(self, stream, frame.uuid)

    def arrivals(self, pool: DeviceCopyPool) -> IpcArrivals | None:
        """Return by what one transfer may come into memory of the buffer's GPU.

        What is kept has the digest of all its bytes, unless the link has none: an
        entry is known again by it.
        """
        allocation = self._buffer.allocation
        if not self._is_open or allocation is None or allocation.uuid != self._uuid:
            return None
        return IpcArrivals(
            *(self._memory, pool, self._link.progress, self._digest),
            is_kept=self._link.digest != "off",
        )

    def begin(self, stream: LinkStream, exported: Exported, uuid: str) -> None:
        """Open what the peer has shown, and say so. Never waits."""
        opening = self._open(stream, exported, uuid)
        loop = asyncio.get_running_loop()
        self._opening = loop.create_task(opening, name="asynckv: open a peer's GPU")

    def close(self) -> None:
        """Read nothing more, and close it when nothing is being read. Never waits."""
        self._is_open = False
        if self._opening is not None:
            self._opening.cancel()
        self._memory.close()

    async def aclose(self) -> None:
        """As :meth:`close`, and wait for it, about 2 s at most."""
        self.close()
        if self._opening is not None:
            await asyncio.wait({self._opening})
        await self._memory.aclose()

    def _own(self, uuid: str) -> DeviceAllocation | None:
        own = self._buffer.allocation
        return own if own is not None and own.uuid == uuid else None

    async def _open(self, stream: LinkStream, exported: Exported, uuid: str) -> None:
        link = self._link
        try:
            if (own := self._own(uuid)) is None:
                raise ConfigError("the buffer was closed meanwhile")
            async with asyncio.timeout(_OPEN_S):
                export, nonce = await open_export(exported, own)
        except (AsyncKVError, OSError, TimeoutError) as exc:
            logger.info("what %s puts is not read in a GPU: %s", link.peer.id, str(exc))
            stream.send(to_failure(exc))
            return
        except asyncio.CancelledError:
            stream.send(Cancelled())
            raise
        self._memory.put(export)
        self._digest = strictest(self._digest, exported.digest)
        self._uuid, self._is_open = uuid, True
        stream.send(Imported(nonce))
        stream.send(Accepted())
        logger.info("what %s puts is read in its memory of a GPU", link.peer.id)

    def _lost(self, error: Exception) -> None:
        was_open = self._is_open
        self.close()
        if was_open and self._link.is_open:
            logger.warning(
                "what %s puts goes through host memory from here on: %s",
                *(self._link.peer.id, str(error)),
            )


class _Opening:
    """From the wish to what was shown."""

    def __init__(self, sources: PeerSources, stream: LinkStream, uuid: str) -> None:
        self._sources = sources
        self._stream = stream
        self._uuid = uuid
        self._has_begun = False

    def on_frame(self, frame: Frame, body: bytes) -> None:
        match frame:
            case Exported() if not self._has_begun:
                self._has_begun = True
                self._sources.begin(self._stream, frame, self._uuid)
            case Cancel():
                self._sources.close()
                self._stream.send(Cancelled())
            case _:
                raise RemoteProtocolError(f"no {type(frame).__name__} belongs here")

    def on_lost(self, error: PeerLost) -> None:
        """The link tells the sources."""


class DeviceService(Service):
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
        super().__init__(link)
        self.sources = PeerSources(buffer, link, map_digest)
        self.way: GpuLink | None = None
        self.copies = HostCopies()
        self._buffer = buffer
        self._digest: MapDigest = digest
        self._may_use_nccl = may_use_nccl
        self._was_asked = False

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
        self.run(self._open(channel, frame, device), "connect GPUs")
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

    async def wait_idle(self) -> None:
        """Wait while the peer's GPU waits for this one. Cancelling leaves no trace."""
        way = self.way
        if way is not None and way.is_opening:
            opened = asyncio.Event()
            way.call_when_opened(opened.set)
            await opened.wait()

    async def wait_ended(self) -> None:
        """Wait until the GPU has let go, about 1 s at most."""
        await super().wait_ended()
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


OpensMemory: TypeAlias = OpenMap | OpenIpc
"""What a peer says that wants to read where a buffer's bytes lie."""


class Showing:
    """What the peer of one link is shown of a buffer's memory, once it asks.

    ``holder`` is what it has open, when that is proved; ``digest`` what is compared
    of what it reads there.
    """

    def __init__(self, link: Link, sharing: Sharing, digest: MapDigest) -> None:
        self.link = link
        self.holder: MapHolder | None = None
        self._sharing = sharing
        self.digest: MapDigest = digest
        self._asked: frozenset[type[Frame]] = frozenset()

    def open(self, stream: LinkStream, asked: OpensMemory) -> StreamHandler:
        """Answer the wish; what is returned hears what the peer has read.

        :raises ConfigError: this side shows nothing to that peer
        :raises RemoteProtocolError: it has asked so before
        """
        kind = type(asked)
        if kind in self._asked:
            raise RemoteProtocolError("a link maps memory once")
        self._asked |= {kind}
        holder, shown = (
            self._invite() if isinstance(asked, OpenMap) else self._export(asked.uuid)
        )
        stream.send(shown)
        return _Proof(self, stream, holder)

    def _invite(self) -> tuple[MapHolder, Mappable]:
        found = None
        if self.link.may_map:
            found = self._sharing.invite(self.link, self.digest)
        if found is None:
            raise ConfigError("this side has no memory that could be mapped")
        return found

    def _export(self, uuid: str) -> tuple[MapHolder, Exported]:
        link, found = self.link, None
        # A handle is all that a process of this host needs, to write there too.
        if link.may_map and link.own_host == link.peer_host:
            found = self._sharing.export(link, uuid, self.digest)
        if found is None:
            raise ConfigError("this side has no memory of that GPU to show")
        return found


class _Proof:
    """From what was shown to what the peer has read there, or to other ways."""

    def __init__(self, showing: Showing, stream: LinkStream, holder: MapHolder) -> None:
        self._showing = showing
        self._stream = stream
        self._holder = holder

    def on_frame(self, frame: Frame, body: bytes) -> None:
        match frame:
            case Mapped(found=found) | Imported(found=found):
                self._on_found(found)
            case Cancel():
                self._holder.link_over()
                self._stream.send(Cancelled())
            case _:
                raise RemoteProtocolError(f"no {type(frame).__name__} belongs here")

    def on_lost(self, error: PeerLost) -> None:
        """The holder hears of it from the link."""

    def _on_found(self, found: bytes) -> None:
        link, holder = self._showing.link, self._holder
        if not holder.verify(found):
            holder.link_over()
            error = ConfigError("that is not what the memory holds")
            self._stream.send(to_failure(error))
            return
        self._showing.holder = holder
        if holder.memory_file.must_be_closed_there:
            link.use_ipc()
            logger.info("%s opens the GPU memory of this process", link.peer.id)
        else:
            link.use_map()
            logger.info("%s maps the memory of this process", link.peer.id)
        self._stream.send(Accepted())
