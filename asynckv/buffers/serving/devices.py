"""What a buffer's side does for a peer's GPU.

A peer may wish to connect its GPU with that of the buffers, or to open a buffer's
memory; and the buffer's side opens memory of a GPU that a peer inserts from. What is
inserted is copied from there on the GPU. Where that fails, what was on its way is asked
for once more through host memory, as is all that follows.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeAlias

from asynckv.buffers.in_memory import InMemoryBuffer
from asynckv.buffers.lookup import LookupBuffer
from asynckv.buffers.serving.service import Service
from asynckv.devices.copying import CopyPool
from asynckv.devices.names import Device
from asynckv.errors import AsyncKVError, ConfigError, RemoteProtocolError
from asynckv.links.link import Link, LinkStream
from asynckv.links.streams import StreamHandler
from asynckv.protocol.frames import OpeningFrame
from asynckv.protocol.handshake import DigestMode
from asynckv.protocol.transfer_frames import OpenDevices, OpenMemory
from asynckv.sharing.exporter import Exporter, Importer, warn_of_loss
from asynckv.sharing.gpu_channel import DeviceStream, GpuLink, NcclRoute
from asynckv.sharing.handshake import Handshake
from asynckv.sharing.imports import PeerMemory
from asynckv.transfers.host_copies import HostCopies
from asynckv.transfers.incoming import Route
from asynckv.transfers.read_route import IpcRoute

__all__ = (
    "BufferExport",
    "DeviceService",
    "PeerImport",
)


logger = logging.getLogger(__name__)

_OPEN_S: Final = 10.0

_Run: TypeAlias = Callable[[Coroutine[Any, Any, None], str], object]
"""Owns a task, of that name, until it ends."""


class PeerImport:
    """What one link's peer exports to put from, for ``buffer`` if it is on a GPU.

    ``digest`` is what this side wants to be compared of what is read there.
    """

    def __init__(self, buffer: InMemoryBuffer, link: Link, digest: DigestMode) -> None:
        self._buffer = buffer
        self._link = link
        self._memory = PeerMemory(self._lost, digest)
        self._opening: asyncio.Task[None] | None = None

    def open(self, stream: LinkStream, frame: OpenMemory) -> StreamHandler:
        """Answer the wish; what is returned hears what is exported.

        :raises ConfigError: nothing that the peer exports is read
        :raises RemoteProtocolError: it has asked so before
        """
        link = self._link
        if self._opening is not None:
            raise RemoteProtocolError("a link exports memory to put from once")
        # As with what this side exports: only processes of one host read each other's.
        is_here = link.may_map and link.own_host == link.peer_host
        if not is_here or self._buffer.growth.allocation is None:
            raise ConfigError("this side reads no memory of a GPU")
        link.call_when_lost(lambda _: self.close())
        handshake = Handshake.answer(stream, frame)
        opening = self._open(handshake)
        loop = asyncio.get_running_loop()
        self._opening = loop.create_task(opening, name="asynckv: open a peer's GPU")
        return handshake

    def device_route(self, pool: CopyPool) -> IpcRoute | None:
        """Return by what one transfer may come into memory of the buffer's GPU.

        What is kept has the digest of all its bytes, unless the link has none: an
        entry is known again by it.
        """
        memory, link = self._memory, self._link
        if not memory.is_open or self._buffer.growth.allocation is None:
            return None
        return IpcRoute(
            *(memory, pool, link.progress, memory.digest), is_kept=link.digest != "off"
        )

    def close(self) -> None:
        """Read nothing more, and close it when nothing is being read. Never waits."""
        if self._opening is not None:
            self._opening.cancel()
        self._memory.close()

    async def aclose(self) -> None:
        """As :meth:`close`, and wait for it, about 2 s at most."""
        self.close()
        if self._opening is not None:
            await asyncio.wait({self._opening})
        await self._memory.aclose()

    async def _open(self, handshake: Handshake) -> None:
        peer = self._link.peer.id
        try:
            with handshake:
                exposed = await handshake.exposed
                if (own := self._buffer.growth.allocation) is None:
                    raise ConfigError("the buffer was closed meanwhile")
                async with asyncio.timeout(_OPEN_S):
                    nonce = await self._memory.open(exposed, own)
                handshake.check()
                handshake.prove(nonce)
                handshake.accept()
        except (AsyncKVError, OSError, TimeoutError) as exc:
            self._memory.close()
            logger.info("what %s puts is not read in a GPU: %s", peer, str(exc))
        else:
            logger.info("what %s puts is read in its memory of a GPU", peer)

    def _lost(self, error: Exception) -> None:
        was_open = self._memory.is_open
        self.close()
        if was_open:
            warn_of_loss(self._link, "what is put by", str(error))


class DeviceService(Service):
    """Connects the GPU of ``buffer`` with that of one link's peer, once it asks.

    ``way`` is what connects them from then on, for whatever is sent from here, or
    inserted; ``copies`` are in host memory, for what goes another way. ``digest`` is
    what this side wants to be compared of what goes there.

    ``peer_import`` is what a peer on the same GPU, or another one of the host, inserts
    from, and a ``map_digest`` is compared of.
    """

    def __init__(
        self,
        buffer: LookupBuffer,
        link: Link,
        digest: DigestMode,
        *,
        may_use_nccl: bool,
        map_digest: DigestMode = "edges",
    ) -> None:
        super().__init__(link)
        self.peer_import = PeerImport(buffer, link, map_digest)
        self.way: GpuLink | None = None
        self.copies = HostCopies()
        self._buffer = buffer
        self._digest: DigestMode = digest
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
        match frame:
            case OpenMemory(of="inserts") if self._may_use_nccl:
                return self.peer_import.open(stream, frame)
            case OpenDevices():
                return self._connect(stream, frame)
            case _:
                return None

    def _connect(self, stream: LinkStream, frame: OpenDevices) -> StreamHandler:
        if self._was_asked:
            raise RemoteProtocolError("a link connects GPUs once")
        self._was_asked = True
        device = self._buffer.growth.open_device
        if device is None or not self._may_use_nccl:
            raise ConfigError("this side has no GPU to send from")
        channel = DeviceStream.answer(stream)
        self.run(self._open(channel, frame, device), "connect GPUs")
        return channel

    def device_route(self, *, on_gpu: bool) -> Route | None:
        """Return by what one transfer may come into memory of the buffer's GPU.

        By NCCL, if it lies ``on_gpu`` there.

        What is kept has the digest of all its bytes, unless the link has none: an
        entry is known again by it.
        """
        way, pool = self.way, self._buffer.pool
        if pool.device is None:
            return None
        if (shared := self.peer_import.device_route(pool)) is not None:
            return shared
        if way is None or not way.is_open or not on_gpu:
            return None
        return NcclRoute(way, pool, "off" if self.link.digest == "off" else "full")

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
        await self.peer_import.aclose()

    async def _open(
        self, channel: DeviceStream, asked: OpenDevices, device: Device
    ) -> None:
        way = None
        try:
            with channel:
                self.way = way = await GpuLink.make(self.link, device, self._digest)
                await way.answer(channel, asked.description)
        except (AsyncKVError, OSError, TimeoutError) as exc:
            logger.info("no way from GPU to GPU to %s: %s", self.link.peer.id, exc)
        if way is not None:
            await way.closed()  # until then the buffers' memory may be sent from


class BufferExport:
    """What the peer of one link may read of a buffer's memory, once it asks.

    ``importer`` is the peer, when it has proved that it reads it; ``digest`` is what is
    compared of what it reads there. ``run`` owns the task of a peer that has asked.
    """

    def __init__(self, link: Link, exporter: Exporter, digest: DigestMode) -> None:
        self.link = link
        self.importer: Importer | None = None
        self._exporter = exporter
        self.digest: DigestMode = digest
        self._asked: frozenset[bool] = frozenset()

    def open(self, stream: LinkStream, asked: OpenMemory, run: _Run) -> StreamHandler:
        """Answer the wish; what is returned hears what the peer has read.

        :raises ConfigError: this side exports nothing to that peer
        :raises RemoteProtocolError: it has asked so before
        """
        is_on_gpu = bool(asked.gpu_uuid)
        if is_on_gpu in self._asked:
            raise RemoteProtocolError("a link maps memory once")
        self._asked |= {is_on_gpu}
        importer = self._exporter.export(self.link, self.digest, asked.gpu_uuid)
        handshake = Handshake.answer(stream, asked)
        run(self._export(handshake, importer), f"export memory to {self.link.peer.id}")
        return handshake

    async def _export(self, handshake: Handshake, importer: Importer) -> None:
        link = self.link
        try:
            with handshake:
                await handshake.export(importer)
                self.importer = importer
                if importer.memory_file.must_be_closed_there:
                    link.use_ipc()
                    logger.info("%s opens the GPU memory of this process", link.peer.id)
                else:
                    link.use_map()
                    logger.info("%s maps the memory of this process", link.peer.id)
                handshake.accept()
        except AsyncKVError as exc:
            logger.debug("%s does not open memory: %s", link.peer.id, str(exc))
