"""One request and all that follows from it: who hears of it, who answers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import msgspec

from asynckv.errors import PeerLost
from asynckv.protocol.codec import Buffer
from asynckv.protocol.frames import Frame, OpeningFrame

if TYPE_CHECKING:
    from asynckv.links.link import Link
    from asynckv.links.outgoing import Outgoing
    from asynckv.protocol.session import Session

__all__ = ("LinkStream", "Service", "StreamHandler")


class StreamHandler(Protocol):
    """Who hears of one stream. Plain functions on the loop; never waited for.

    A :exc:`~asynckv.errors.ProtocolError` from :meth:`on_frame` breaks the
    link and tells the peer why. Any other exception is a fault of ours: it is
    logged and the link is aborted.
    """

    def on_frame(self, frame: Frame, body: bytes) -> None:
        """A frame came, with its whole body."""

    def on_lost(self, error: PeerLost) -> None:
        """The link ended before the stream did. Called once, on a later tick.

        ``error.goodbye`` tells a clean close by either side from a loss. Each
        handler gets an error of its own, which it may raise.
        """


class Service(Protocol):
    """Who answers the requests of a peer."""

    def open(
        self, stream: LinkStream, frame: OpeningFrame, body: bytes
    ) -> StreamHandler:
        """The peer opens ``stream``; return who hears of it from here on.

        An ``AsyncKVError``, ``KeyError`` or ``ValueError`` is sent as the
        stream's Failure; a :exc:`~asynckv.errors.RemoteProtocolError` breaks
        the link. Anything else is a fault of ours and aborts the link.
        """


class LinkStream(msgspec.Struct, eq=False):
    """A stream of a link, as the side that asks and the side that answers see it."""

    # A Struct, because two are made for each request.
    link: Link
    _session: Session[StreamHandler]
    _outgoing: Outgoing
    id: int

    def __repr__(self) -> str:
        return f"<LinkStream {self.id} of {self.link!r}>"

    def send(self, frame: Frame, body: Buffer = b"") -> None:
        """Queue a frame; nothing happens if stream or link are over.

        Never waits. ``body`` may be overwritten on return. The responder's
        final frame (Accepted, Result, Failure, Cancelled) ends the stream,
        unless it was opened by OpenPipe: then only a Failure does.

        :raises LocalProtocolError: it is longer than ``link.limits``
        """
        if self._session.send(self.id, frame, body):
            self._outgoing.flush_soon()

    def send_at_once(self, frame: Frame, body: Buffer = b"") -> None:
        """As :meth:`send`; written now, unless something was in this tick already."""
        if self._session.send(self.id, frame, body):
            self._outgoing.flush_first()

    def close(self) -> None:
        """Forget the stream: its handler hears nothing more, nor of a loss."""
        self._session.close(self.id)
