"""Frames to bytes and back. No I/O: feed it bytes, ask it for frames.

A body longer than :data:`BODY_PART_BYTES` is cut in parts of exactly that size (the
last may be shorter), so that other frames find their place between them; one that is
cut in any other way is refused. Everything is judged by what a header claims, before
its part is kept. A frame whose body fits in one part, as nearly all do, is made and
read in one step.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final
from zlib import crc32

import msgspec

from asynckv.errors import LocalProtocolError, RemoteProtocolError
from asynckv.observability.lines import as_line
from asynckv.protocol.frames import Frame
from asynckv.protocol.limits import Share
from asynckv.protocol.values import Limits
from asynckv.protocol.wire import (
    CRC32_OFFSET,
    HEADER_BYTES,
    PLAIN,
    TYPE_CHUNK,
    TYPE_CONTINUATION,
    TYPE_CONTROL,
    Header,
    check_magic,
    checksum_of,
    pack_fields,
    pack_header,
    unpack_fields,
    unpack_header,
    xxh3,
)

__all__ = (
    "BODY_PART_BYTES",
    "Bodies",
    "Buffer",
    "FrameDecoder",
    "encode_frame",
    "encode_parts",
    "encode_plain",
    "max_unfinished_bytes",
)


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


Buffer = bytes | bytearray | memoryview

_DEFAULT_LIMITS: Final = Limits()
_MAX_WHY: Final = 200
_CHANGED: Final = "a frame fails its checksum"
_encode: Final = msgspec.msgpack.Encoder().encode
_decoder: Final[msgspec.msgpack.Decoder[Frame]] = msgspec.msgpack.Decoder(Frame)
_decode: Final = _decoder.decode
# Bad UTF-8 is a plain ValueError and deep nesting a RecursionError.
_NO_FRAME: Final = (msgspec.MsgspecError, ValueError, RecursionError)


def encode_plain(stream: int, frame: Frame, body: bytes, limits: Limits) -> bytes:
    """Return the one wire frame of a body that fits in a part.

    :raises LocalProtocolError: control part or body are longer than ``limits``
    """
    control = _encode(frame)
    control_bytes, nbytes = len(control), len(body)
    if control_bytes > limits.max_control_bytes or nbytes > limits.max_body_bytes:
        raise _too_long(frame, control_bytes, nbytes, limits)
    checksum = xxh3(body, xxh3(control)) if body else xxh3(control)
    fields = pack_fields(PLAIN, control_bytes, nbytes, stream, checksum)
    return b"".join((fields, crc32(fields).to_bytes(4, "big"), control, body))


def encode_parts(
    stream: int, frame: Frame, body: bytes, limits: Limits
) -> tuple[bytes, Iterator[bytes]]:
    """Return the first wire frame of a longer body, and what makes the others.

    :raises LocalProtocolError: control part or body are longer than ``limits``
    """
    control = _encode(frame)
    control_bytes, nbytes = len(control), len(body)
    if control_bytes > limits.max_control_bytes or nbytes > limits.max_body_bytes:
        raise _too_long(frame, control_bytes, nbytes, limits)
    view = memoryview(body)
    part = view[:BODY_PART_BYTES]
    header = pack_header(
        TYPE_CONTROL,
        control_bytes,
        BODY_PART_BYTES,
        stream,
        more=True,
        checksum=checksum_of(control, part),
    )
    return b"".join((header, control, part)), _continuations(stream, view)


def _too_long(
    frame: Frame, control_bytes: int, body_bytes: int, limits: Limits
) -> LocalProtocolError:
    if control_bytes > limits.max_control_bytes:
        return LocalProtocolError(
            f"{type(frame).__name__} takes {control_bytes} bytes of control, "
            f"more than the {limits.max_control_bytes} of this link"
        )
    return LocalProtocolError(
        f"the body of {type(frame).__name__} has {body_bytes} bytes, "
        f"more than the {limits.max_body_bytes} of this link"
    )


def _continuations(stream: int, body: memoryview) -> Iterator[bytes]:
    for start in range(BODY_PART_BYTES, len(body), BODY_PART_BYTES):
        part = body[start : start + BODY_PART_BYTES]
        more = start + len(part) < len(body)
        header = pack_header(
            TYPE_CONTINUATION,
            0,
            len(part),
            stream,
            more=more,
            checksum=checksum_of(b"", part),
        )
        yield header + part


def encode_frame(
    stream: int, frame: Frame, body: Buffer = b"", *, limits: Limits = _DEFAULT_LIMITS
) -> list[bytes]:
    """Return the wire frames that carry ``frame`` and ``body``, in order.

    :raises LocalProtocolError: control part or body are longer than ``limits``
    """
    body = bytes(body)
    if len(body) <= BODY_PART_BYTES:
        return [encode_plain(stream, frame, body, limits)]
    first, others = encode_parts(stream, frame, body, limits)
    return [first, *others]


class FrameDecoder:
    """Turns any chunking of the byte stream into whole frames.

    ``limits`` is checked against the lengths the peer *claims*, before a byte
    of what they announce is kept. After an error the decoder is dead: every
    further call raises it again.
    """

    def __init__(self, limits: Limits = _DEFAULT_LIMITS) -> None:
        self.bodies = Bodies(limits)
        self.limit(limits)
        # The beginning of a frame, and how many bytes of it are to be judged next.
        self._pending = bytearray()
        self._wanted_bytes = HEADER_BYTES
        self.has_unread = False
        """Has something been fed that was not looked at yet?"""
        self._data, self._start = b"", 0
        self._error: RemoteProtocolError | None = None

    def limit(self, limits: Limits) -> None:
        """Let what comes from here on be as long as ``limits`` say."""
        self._max_control_bytes = limits.max_control_bytes
        self._max_part_bytes = min(BODY_PART_BYTES, limits.max_body_bytes)
        self.bodies.limits = limits

    @property
    def missing_bytes(self) -> int:
        """How many bytes to read next, so as not to read beyond a frame."""
        return self._wanted_bytes - len(self._pending)

    @property
    def is_idle(self) -> bool:
        """Whether the stream may end here without cutting a frame."""
        return not self._pending and not self.bodies.streams

    def feed(self, data: Buffer) -> Iterator[tuple[int, Frame, bytes]]:
        """Accept ``data``; return stream, frame and whole body of each frame.

        Iterate to the end before the next call. ``data`` may be reused at once.

        :raises RemoteProtocolError: the peer's bytes are not a valid frame
        """
        if self._error is not None:
            raise RemoteProtocolError(*self._error.args, hint=self._error.hint)
        if self._pending:
            data = self._join(data)
        elif type(data) is not bytes:
            data = bytes(data)
        self._data, self._start, self.has_unread = data, 0, True
        return iter(self.next_frame, None)

    def _join(self, data: Buffer) -> bytes:
        """Return what is pending with ``data`` behind it, when that is enough."""
        pending = self._pending
        # Joined once a frame, however small the pieces are.
        if len(pending) + len(data) < self._wanted_bytes:
            pending += data
            return b""
        joined = b"".join((pending, data))
        pending.clear()
        self._wanted_bytes = HEADER_BYTES
        return joined

    def next_frame(self) -> tuple[int, Frame, bytes] | None:
        """Return the next one that is whole in what was fed, or keep the rest of it.

        :raises RemoteProtocolError: the peer's bytes are not a valid frame
        """
        data, start = self._data, self._start
        nbytes = len(data)
        try:
            while nbytes - start >= HEADER_BYTES:
                beginning, control_bytes, body_bytes, stream, checksum, crc = (
                    unpack_fields(data, start)
                )
                control_start = start + HEADER_BYTES
                body_start = control_start + control_bytes
                end = body_start + body_bytes
                # What most frames are; whatever is not, is judged at leisure.
                if (
                    beginning == PLAIN
                    and control_bytes <= self._max_control_bytes
                    and body_bytes <= self._max_part_bytes
                    and end <= nbytes
                    and stream not in self.bodies.streams
                    and crc32(data[start : start + CRC32_OFFSET]) == crc
                ):
                    control, body = data[control_start:body_start], data[body_start:end]
                    if (
                        xxh3(body, xxh3(control)) if body else xxh3(control)
                    ) != checksum:
                        raise RemoteProtocolError(_CHANGED)
                    self._start, self.has_unread = end, end < nbytes
                    return stream, _decode(control), body
                end, whole = self._read_part(data, start)
                self._start = end
                if whole is not None:
                    return whole
                if end == start:
                    break
                start = end
            self._data, self._start, self.has_unread = b"", 0, False
            if start < nbytes:
                self._pending += data[start:]
            if self._pending:
                check_magic(self._pending)  # what is no frame, at its first bytes
            return None
        except RemoteProtocolError as exc:
            self._die(exc)
            raise
        except _NO_FRAME as exc:
            why = as_line(str(exc), max_chars=_MAX_WHY)
            error = RemoteProtocolError(f"not a frame that we know: {why}")
            self._die(error)
            raise error from None  # what a traceback shows of it is the peer's text

    def _die(self, error: RemoteProtocolError) -> None:
        self._error = error
        self._data, self._start, self.has_unread = b"", 0, False
        self._pending.clear()
        self.bodies.clear()

    def _read_part(
        self, data: bytes, start: int
    ) -> tuple[int, tuple[int, Frame, bytes] | None]:
        """Read one part of a body: return where it ends, and what is whole by it.

        The end is the start when it has not come yet, be it a part or all of a
        body: it may be waited for, because its claims are right.
        """
        header = unpack_header(data, start)
        self.bodies.check(header)
        body_start = start + HEADER_BYTES + header.control_bytes
        end = body_start + header.payload_bytes
        if end > len(data):
            self._wanted_bytes = end - start
            return start, None
        control, part = data[start + HEADER_BYTES : body_start], data[body_start:end]
        if checksum_of(control, part) != header.checksum:
            raise RemoteProtocolError(_CHANGED)
        if header.type == TYPE_CONTROL:
            self.bodies.begin(header.stream, _decode(control), part)
        elif header.more:
            self.bodies.go_on(header.stream, part)
        else:
            return end, self.bodies.finish(header.stream, part)
        return end, None
