"""Who hears of one request and of all that follows from it."""

from __future__ import annotations

from typing import Protocol

from asynckv.errors import PeerLost
from asynckv.protocol.frames import Frame

__all__ = ("StreamHandler",)


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
