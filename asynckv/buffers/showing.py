"""The serving side of one peer's wish to open a buffer's memory."""

from __future__ import annotations

import logging
from typing import TypeAlias

from asynckv.errors import ConfigError, PeerLost, RemoteProtocolError
from asynckv.links.link import Link
from asynckv.links.requests import LinkStream, StreamHandler
from asynckv.links.sharing import MapDigest, MapHolder, Sharing
from asynckv.protocol.failures import to_failure
from asynckv.protocol.frames import Accepted, Cancel, Cancelled, Frame
from asynckv.protocol.ipc_frames import Exported, Imported, OpenIpc
from asynckv.protocol.map_frames import Mappable, Mapped, OpenMap

__all__ = ("OpensMemory", "Showing")

logger = logging.getLogger(__name__)

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
