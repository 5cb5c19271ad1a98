"""One end of a pipe's stream: hears its frames, and how it ended."""

from __future__ import annotations

import anyio

from asynckv.errors import ChecksumError, PeerLost, RemoteProtocolError
from asynckv.links.link import Link
from asynckv.links.requests import LinkStream
from asynckv.pipes.inbound import Inbound
from asynckv.pipes.outbound import Outbound
from asynckv.protocol.failures import from_failure, to_failure
from asynckv.protocol.frames import (
    Failure,
    Flushed,
    Frame,
    OpenPipe,
    Push,
    Read,
)
from asynckv.protocol.payload_frames import Done, Grant

__all__ = ("PipeEnd",)


class PipeEnd:
    """Both halves of a pipe, over the one stream of a link of its own."""

    def __init__(self, link: Link, max_bytes: int) -> None:
        self.link = link
        self.outbound = Outbound(link, self._send, max_bytes)
        self.inbound = Inbound(link, self._send, max_bytes, self._break)
        self._stream: LinkStream | None = None
        self._is_over = False

    @classmethod
    def dialled(cls, link: Link, max_bytes: int, name: str = "") -> PipeEnd:
        """Make ``link`` a pipe. The peer may send from here on."""
        end = cls(link, max_bytes)
        end._stream = link.open_stream(end, OpenPipe(name))
        end.inbound.open()
        return end

    @classmethod
    def asked_for(cls, stream: LinkStream, max_bytes: int) -> PipeEnd:
        """Answer the peer that made its link a pipe.

        It sends nothing before ``inbound.open()``.
        """
        end = cls(stream.link, max_bytes)
        end._stream = stream
        return end

    def on_frame(self, frame: Frame, body: bytes) -> None:
        if self._is_over:
            return
        match frame:
            case Push():
                self.inbound.on_push(frame, body)
            case Done():
                self.inbound.on_done(frame)
            case Grant():
                self.outbound.on_grant(frame)
            case Read():
                self.outbound.on_read(frame)
            case Flushed():
                self.outbound.on_flushed(frame)
            case Failure():
                error = from_failure(frame)
                self.abort(PeerLost(f"the peer broke the pipe: {error}"))
            case _:
                raise RemoteProtocolError(f"no {type(frame).__name__} belongs here")

    def on_lost(self, error: PeerLost) -> None:
        self._end(error)

    async def aclose(self) -> None:
        """Say goodbye, and hang up. Bounded and shielded; may be called again."""
        self.inbound.report()
        error = PeerLost("the pipe was closed on this side")
        error.goodbye = True
        self._end(error)
        self.inbound.end(error, keep=False)
        try:
            await self.link.aclose()
        finally:
            with anyio.CancelScope(shield=True):
                await self.inbound.aclose()
                await self.outbound.aclose()

    def abort(self, error: PeerLost | None = None) -> None:
        """Hang up now. What has come whole can be taken if the peer is at fault.

        Never waits.
        """
        ours = PeerLost("the pipe was aborted on this side")
        self._end(error or ours)
        if error is None:
            self.inbound.end(ours, keep=False)
            self.inbound.abort()
            self.outbound.abort()
        self.link.abort(error or ours)

    def _send(self, frame: Frame, body: memoryview) -> None:
        if self._stream is not None:
            self._stream.send(frame, body)

    def _break(self, error: ChecksumError) -> None:
        self._send(to_failure(error), memoryview(b""))
        self._end(PeerLost(f"the pipe is broken: {error.message}"))

    def _end(self, error: PeerLost) -> None:
        self._is_over = True
        self.outbound.end(error)
        self.inbound.end(error)
