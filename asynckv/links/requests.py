"""Who hears of one request and of all that follows from it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from asynckv.errors import AsyncKVError, PeerLost, RemoteProtocolError
from asynckv.protocol.failures import from_failure
from asynckv.protocol.frames import Cancelled, Failure, Frame

__all__ = ("StreamHandler", "fail_by")


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


def fail_by(frame: Frame, request: str, fail: Callable[[Exception], None]) -> None:
    """Call ``fail`` with what a frame means to ``request`` that is no answer to it.

    :raises RemoteProtocolError: it makes no sense at all
    """
    match frame:
        case Failure():
            fail(from_failure(frame))
        case Cancelled():
            fail(AsyncKVError(f"the peer gave the {request} up"))
        case _:
            error = RemoteProtocolError(f"no {type(frame).__name__} belongs here")
            fail(error)  # of a last frame's stream nobody else is told
            raise error
