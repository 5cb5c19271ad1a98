"""Memory of a GPU that a peer inserts from, open on the buffer's side.

What is inserted is copied from there on the GPU. Where that fails, what was on its way
is asked for once more through host memory, as is all that follows.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from asynckv.buffers.in_memory import InMemoryBuffer
from asynckv.errors import AsyncKVError, ConfigError, PeerLost, RemoteProtocolError
from asynckv.links.exports import open_export
from asynckv.links.ipc_arrivals import IpcArrivals
from asynckv.links.link import Link
from asynckv.links.peer_memory import PeerMemory
from asynckv.links.requests import LinkStream
from asynckv.links.sharing import MapDigest
from asynckv.protocol.failures import to_failure
from asynckv.protocol.frames import Accepted, Cancel, Cancelled, Frame
from asynckv.protocol.handshake import strictest
from asynckv.protocol.ipc_frames import Exported, Imported, ShowIpc
from asynckv.tensors.device_copying import DeviceCopyPool
from asynckv.tensors.device_pages import DeviceAllocation

__all__ = ("PeerSources",)

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
