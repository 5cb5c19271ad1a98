"""Bodies that come in parts: what may follow what, and how much at a time.

A body longer than :data:`BODY_PART_BYTES` is cut in parts of exactly that
size (the last may be shorter), so that other frames find their place between
them. Everything is judged by what a header claims, before its part is kept.
"""

from __future__ import annotations

from typing import Final

from asynckv.errors import RemoteProtocolError
from asynckv.protocol.frames import Frame
from asynckv.protocol.header import TYPE_CHUNK, TYPE_CONTROL, Header
from asynckv.protocol.unfinished import Share
from asynckv.protocol.values import Limits

__all__ = ("BODY_PART_BYTES", "Bodies", "max_unfinished_bytes")

BODY_PART_BYTES: Final = 64 * 1024


def max_unfinished_bytes(limits: Limits) -> int:
    """How many bytes of bodies may be under way at a time, on one link."""
    return 2 * limits.max_body_bytes


class _Body:
    """A frame whose body is still coming."""

    __slots__ = ("frame", "nbytes", "parts")

    def __init__(self, frame: Frame, part: bytes) -> None:
        self.frame = frame
        self.parts = [part]
        self.nbytes = len(part)


class Bodies:
    """The bodies of one link that are under way; ``streams`` says on which.

    With a ``share`` they count together with those of other links.
    """

    def __init__(self, limits: Limits) -> None:
        self.streams: dict[int, _Body] = {}
        self.limits = limits
        self.share: Share | None = None
        self._nbytes = 0

    def check(self, header: Header) -> None:
        """Judge a header by what it claims, and by what came before it.

        :raises RemoteProtocolError: it is out of place, or beyond the limits
        """
        if header.type == TYPE_CHUNK:
            raise RemoteProtocolError("a payload chunk on the control connection")
        if header.payload_bytes > BODY_PART_BYTES:
            raise RemoteProtocolError(
                f"{header.payload_bytes} bytes of body in one frame, "
                f"more than {BODY_PART_BYTES}"
            )
        if header.more and header.payload_bytes < BODY_PART_BYTES:
            raise RemoteProtocolError("a body is cut in parts that are not full")
        body = self.streams.get(header.stream)
        if header.type == TYPE_CONTROL:
            self._check_control(header, body)
        elif body is None:
            raise RemoteProtocolError("the continuation of a body that never began")
        elif header.control_bytes or not header.payload_bytes:
            raise RemoteProtocolError("a continuation that is none")
        self._check_bytes(header, body.nbytes if body else 0)

    def _check_control(self, header: Header, body: _Body | None) -> None:
        if body is not None:
            raise RemoteProtocolError("a frame in the middle of its stream's body")
        if header.control_bytes > self.limits.max_control_bytes:
            raise RemoteProtocolError(
                f"{header.control_bytes} bytes of control, "
                f"more than {self.limits.max_control_bytes}"
            )

    def _check_bytes(self, header: Header, before_bytes: int) -> None:
        # A part that says there is more claims at least one byte beyond itself.
        nbytes = before_bytes + header.payload_bytes + header.more
        if nbytes > self.limits.max_body_bytes:
            raise RemoteProtocolError(
                f"a body of at least {nbytes} bytes, "
                f"more than {self.limits.max_body_bytes}"
            )
        kept = self._nbytes + header.payload_bytes
        most = max_unfinished_bytes(self.limits)
        if header.more and kept > most:
            raise RemoteProtocolError(
                f"{kept} bytes of unfinished bodies, more than {most}"
            )

    def begin(self, stream: int, frame: Frame, part: bytes) -> None:
        """Keep the first part of a body, and the frame that it belongs to."""
        self.streams[stream] = _Body(frame, part)
        self._count(stream, len(part))

    def go_on(self, stream: int, part: bytes) -> None:
        """Keep a part that is not the last."""
        body = self.streams[stream]
        body.parts.append(part)
        body.nbytes += len(part)
        self._count(stream, len(part))

    def finish(self, stream: int, part: bytes) -> tuple[int, Frame, bytes]:
        """Return stream, frame and whole body; ``part`` is the last of it."""
        body = self.streams.pop(stream)
        self._nbytes -= body.nbytes
        if self.share is not None:
            self.share.finish(stream)
        return stream, body.frame, b"".join((*body.parts, part))

    def clear(self) -> None:
        """Forget them all: the link is over."""
        self.streams.clear()
        self._nbytes = 0
        if self.share is not None:
            self.share.end()

    def _count(self, stream: int, nbytes: int) -> None:
        self._nbytes += nbytes
        if self.share is not None:
            self.share.add(stream, nbytes)
