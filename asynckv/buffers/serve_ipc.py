"""The serving side of one peer's wish to open a buffer's memory of a GPU."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from asynckv.buffers.sharing import MapHolder
from asynckv.errors import ConfigError, PeerLost, RemoteProtocolError
from asynckv.links.requests import LinkStream
from asynckv.protocol.failures import to_failure
from asynckv.protocol.frames import Accepted, Cancel, Cancelled, Frame
from asynckv.protocol.ipc_frames import Imported, OpenIpc

if TYPE_CHECKING:
    from asynckv.buffers.serve_lookup import LookupService

__all__ = ("ServedIpc",)

logger = logging.getLogger(__name__)


class ServedIpc:
    """From the question to memory that was proved to be open, or to other ways.

    :raises ConfigError: this side shares no memory of that GPU with that peer
    """

    def __init__(
        self, service: LookupService, stream: LinkStream, asked: OpenIpc
    ) -> None:
        self._service = service
        self._stream = stream
        link, sharing = service.link, service.buffer.sharing
        invitation = None
        # A handle is all that a process of this host needs, to write there too.
        if link.may_map and link.own_host == link.peer_host:
            invitation = sharing.export(link, asked.uuid, service.map_digest)
        if invitation is None:
            raise ConfigError("this side has no memory of that GPU to show")
        self._holder: MapHolder = invitation[0]
        stream.send(invitation[1])

    def on_frame(self, frame: Frame, body: bytes) -> None:
        match frame:
            case Imported(found=found):
                self._on_imported(found)
            case Cancel():
                self._holder.link_over()
                self._stream.send(Cancelled())
            case _:
                raise RemoteProtocolError(f"no {type(frame).__name__} belongs here")

    def on_lost(self, error: PeerLost) -> None:
        """The holder hears of it from the link."""

    def _on_imported(self, found: bytes) -> None:
        link = self._service.link
        if not self._holder.verify(found):
            self._holder.link_over()
            error = ConfigError("that is not what the memory holds")
            self._stream.send(to_failure(error))
            return
        self._service.holder = self._holder
        link.use_ipc()
        logger.info("%s reads this process's memory of a GPU", link.peer.id)
        self._stream.send(Accepted())
