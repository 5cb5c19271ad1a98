"""The serving side of one peer's wish to map a buffer's memory."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from asynckv.buffers.sharing import MapHolder
from asynckv.errors import ConfigError, PeerLost, RemoteProtocolError
from asynckv.links.requests import LinkStream
from asynckv.protocol.failures import to_failure
from asynckv.protocol.frames import Accepted, Cancel, Cancelled, Frame
from asynckv.protocol.map_frames import Mapped

if TYPE_CHECKING:
    from asynckv.buffers.serve_lookup import LookupService

__all__ = ("ServedMap",)

logger = logging.getLogger(__name__)


class ServedMap:
    """From the question to a mapping that was proved, or to lanes as before.

    :raises ConfigError: this side shares nothing with that peer
    """

    def __init__(self, service: LookupService, stream: LinkStream) -> None:
        self._service = service
        self._stream = stream
        link, sharing = service.link, service.buffer.sharing
        invitation = sharing.invite(link, service.map_digest) if link.may_map else None
        if invitation is None:
            raise ConfigError("this side has no memory that could be mapped")
        self._holder: MapHolder = invitation[0]
        stream.send(invitation[1])

    def on_frame(self, frame: Frame, body: bytes) -> None:
        match frame:
            case Mapped(found=found):
                self._on_mapped(found)
            case Cancel():
                self._holder.link_over()
                self._stream.send(Cancelled())
            case _:
                raise RemoteProtocolError(f"no {type(frame).__name__} belongs here")

    def on_lost(self, error: PeerLost) -> None:
        """The holder hears of it from the link."""

    def _on_mapped(self, found: bytes) -> None:
        link = self._service.link
        if not self._holder.verify(found):
            self._holder.link_over()
            error = ConfigError("that is not what the memory holds")
            self._stream.send(to_failure(error))
            return
        self._service.holder = self._holder
        link.use_map()
        logger.info("%s reads memory of this process where it lies", link.peer.id)
        self._stream.send(Accepted())
