"""The stream by which both sides of a pipe show each other memory of one GPU.

Who asks is shown the other side's memory first, proves that it reads it, and shows its
own. Rule of this file: nothing waits but for a frame.
"""

from __future__ import annotations

import asyncio

from asynckv.errors import AsyncKVError, PeerLost, RemoteProtocolError
from asynckv.links.requests import LinkStream
from asynckv.protocol.failures import from_failure, to_failure
from asynckv.protocol.frames import Accepted, Cancel, Cancelled, Failure, Frame
from asynckv.protocol.ipc_frames import Exported, Imported

__all__ = ("SharingStream",)


class SharingStream:
    """One side of it. What comes is kept until it is waited for."""

    def __init__(self, *, answers: bool) -> None:
        loop = asyncio.get_running_loop()
        self._answers = answers
        self._stream: LinkStream | None = None
        self._exported: asyncio.Future[Exported] = loop.create_future()
        self._found: asyncio.Future[bytes] = loop.create_future()
        self._is_over = False

    def use(self, stream: LinkStream) -> None:
        """Send by ``stream`` from here on."""
        self._stream = stream

    async def exported(self) -> Exported:
        """Wait for what the peer shows. A cancelled call leaves no trace.

        :raises PeerLost: the link ended first
        :raises AsyncKVError: the peer has refused, or has given it up
        """
        return await asyncio.shield(self._exported)

    async def found(self) -> bytes:
        """Wait for what the peer has read in this side's memory, as for that."""
        return await asyncio.shield(self._found)

    def send(self, frame: Exported | Imported) -> None:
        """Say that, unless it is over. Never waits."""
        if self._stream is not None and not self._is_over:
            self._stream.send(frame)

    def accept(self) -> None:
        """All is as it should be: the side that answers says so last."""
        self._end(Accepted())

    def leave(self, error: BaseException) -> None:
        """Nothing is shared: say so, unless it is over. Never waits."""
        if not self._answers:
            self._end(Cancel())
        elif isinstance(error, Exception):
            self._end(to_failure(error))
        else:
            self._end(Cancelled())

    def on_frame(self, frame: Frame, body: bytes) -> None:
        if body:
            raise RemoteProtocolError(f"{type(frame).__name__} with a body")
        if self._is_over:
            return
        match frame:
            case Exported() if not self._exported.done():
                self._exported.set_result(frame)
            case Imported() if not self._found.done():
                self._found.set_result(frame.found)
            case Accepted():
                self._is_over = True
            case Failure():
                self._fail(from_failure(frame))
            case Cancelled():
                self._fail(AsyncKVError("the peer has given it up"))
            case Cancel() if self._answers:
                self._end(Cancelled())
                self._fail(AsyncKVError("the peer has given it up"))
            case _:
                raise RemoteProtocolError(f"{type(frame).__name__} makes no sense here")

    def on_lost(self, error: PeerLost) -> None:
        self._fail(error)

    def _fail(self, error: Exception) -> None:
        self._is_over = True
        for future in (self._exported, self._found):
            if not future.done():
                future.set_exception(error)
                future.exception()  # whoever waits hears of it; else nobody

    def _end(self, frame: Accepted | Cancel | Cancelled | Failure) -> None:
        if self._stream is not None and not self._is_over:
            self._is_over = True
            self._stream.send(frame)
