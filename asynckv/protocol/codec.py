"""Frames to bytes and back. No I/O: feed it bytes, ask it for frames.

A body longer than :data:`BODY_PART_BYTES` is cut in parts of exactly that
size (the last may be shorter), so that other frames find their place between
them. A body that is cut in any other way is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import msgspec

from asynckv.errors import LocalProtocolError, RemoteProtocolError
from asynckv.protocol.frames import Frame, Limits
from asynckv.protocol.header import (
    HEADER_BYTES,
    TYPE_CHUNK,
    TYPE_CONTINUATION,
    TYPE_CONTROL,
    Header,
    check_magic,
    checksum_of,
    pack_header,
    unpack_header,
)

__all__ = (
    "BODY_PART_BYTES",
    "Buffer",
    "FrameDecoder",
    "encode_frame",
    "encode_parts",
    "max_unfinished_bytes",
)

BODY_PART_BYTES: Final = 64 * 1024

Buffer = bytes | bytearray | memoryview

_DEFAULT_LIMITS: Final = Limits()
_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final[msgspec.msgpack.Decoder[Frame]] = msgspec.msgpack.Decoder(Frame)


def max_unfinished_bytes(limits: Limits) -> int:
    """How many bytes of bodies may be under way at a time, on one link."""
    return 2 * limits.max_body_bytes


def encode_parts(
    stream: int, frame: Frame, body: Buffer = b"", *, limits: Limits = _DEFAULT_LIMITS
) -> tuple[bytes, Iterator[bytes] | None]:
    """Return the first wire frame, and what makes the others if there are any.

    :raises LocalProtocolError: control part or body are longer than ``limits``
    """
    control = _encoder.encode(frame)
    control_bytes, nbytes = len(control), len(body)
    if control_bytes > limits.max_control_bytes:
        raise LocalProtocolError(
            f"{type(frame).__name__} takes {control_bytes} bytes of control, "
            f"more than the {limits.max_control_bytes} of this link"
        )
    if nbytes > limits.max_body_bytes:
        raise LocalProtocolError(
            f"the body of {type(frame).__name__} has {nbytes} bytes, "
            f"more than the {limits.max_body_bytes} of this link"
        )
    if nbytes <= BODY_PART_BYTES:
        header = pack_header(
            TYPE_CONTROL,
            control_bytes,
            nbytes,
            stream,
            checksum=checksum_of(control, body),
        )
        return (header + control + body if nbytes else header + control), None
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
    first, others = encode_parts(stream, frame, body, limits=limits)
    return [first, *others] if others is not None else [first]


class _Unfinished:
    """A frame whose body is still coming."""

    __slots__ = ("frame", "nbytes", "parts")

    def __init__(self, frame: Frame, part: bytes) -> None:
        self.frame = frame
        self.parts = [part]
        self.nbytes = len(part)


class FrameDecoder:
    """Turns any chunking of the byte stream into whole frames.

    ``limits`` is checked against the lengths the peer *claims*, before a byte
    of what they announce is kept; it may be replaced between two frames. After
    an error the decoder is dead: every further call raises it again.
    """

    def __init__(self, limits: Limits = _DEFAULT_LIMITS) -> None:
        self.limits = limits
        self._pending = bytearray()
        self._header: Header | None = None
        self._unfinished: dict[int, _Unfinished] = {}
        self._unfinished_bytes = 0
        self._error: RemoteProtocolError | None = None

    @property
    def missing_bytes(self) -> int:
        """How many bytes to read next, so as not to read beyond a frame."""
        return self._wanted_bytes() - len(self._pending)

    @property
    def is_idle(self) -> bool:
        """Whether the stream may end here without cutting a frame."""
        return not self._pending and not self._unfinished

    def feed(self, data: Buffer) -> Iterator[tuple[int, Frame, bytes]]:
        """Accept ``data`` and yield stream, frame and whole body of each frame.

        Iterate to the end before the next call. ``data`` may be reused then.

        :raises RemoteProtocolError: the peer's bytes are not a valid frame
        """
        if self._error is not None:
            raise RemoteProtocolError(*self._error.args, hint=self._error.hint)
        pending = self._pending
        if pending or self._header is not None:
            pending += data
            # Joined once a frame, however small the pieces are.
            if len(pending) < self._wanted_bytes():
                self._check_beginning()
                return
            data = bytes(pending)
            pending.clear()
        elif type(data) is not bytes:
            data = bytes(data)
        start, nbytes = 0, len(data)
        try:
            while nbytes - start >= HEADER_BYTES:
                header = self._header or self._read_header(data, start)
                body_start = start + HEADER_BYTES + header.control_bytes
                end = body_start + header.payload_bytes
                if end > nbytes:
                    self._header = header
                    break
                self._header = None
                control, part = (
                    data[start + HEADER_BYTES : body_start],
                    data[body_start:end],
                )
                start = end
                if checksum_of(control, part) != header.checksum:
                    raise RemoteProtocolError("a frame fails its checksum")
                if header.type == TYPE_CONTROL and not header.more:
                    yield header.stream, _decode(control), part
                elif (whole := self._accept(header, control, part)) is not None:
                    yield whole
        except RemoteProtocolError as exc:
            self._die(exc)
            raise
        if start < nbytes:
            pending += data[start:]
            self._check_beginning()

    def _check_beginning(self) -> None:
        """Refuse what is no frame at its first bytes, not when a header is whole."""
        if self._header is None:
            try:
                check_magic(self._pending)
            except RemoteProtocolError as exc:
                self._die(exc)
                raise

    def _die(self, error: RemoteProtocolError) -> None:
        self._error = error
        self._pending = bytearray()
        self._unfinished.clear()

    def _wanted_bytes(self) -> int:
        if self._header is None:
            return HEADER_BYTES
        return HEADER_BYTES + self._header.control_bytes + self._header.payload_bytes

    def _read_header(self, data: bytes, start: int) -> Header:
        """Read and check the header at ``start``."""
        header, limits = unpack_header(data, start), self.limits
        is_plain = (
            header.type == TYPE_CONTROL
            and not header.more
            and not self._unfinished
            and header.control_bytes <= limits.max_control_bytes
            and header.payload_bytes <= BODY_PART_BYTES
            and header.payload_bytes <= limits.max_body_bytes
        )
        if not is_plain:
            self._check(header)
        return header

    def _check(self, header: Header) -> None:
        limits = self.limits
        if header.type == TYPE_CHUNK:
            raise RemoteProtocolError("a payload chunk on the control connection")
        if header.payload_bytes > BODY_PART_BYTES:
            raise RemoteProtocolError(
                f"{header.payload_bytes} bytes of body in one frame, "
                f"more than {BODY_PART_BYTES}"
            )
        if header.more and header.payload_bytes < BODY_PART_BYTES:
            raise RemoteProtocolError("a body is cut in parts that are not full")
        unfinished = self._unfinished.get(header.stream)
        if header.type == TYPE_CONTROL:
            self._check_control(header, unfinished)
        elif unfinished is None:
            raise RemoteProtocolError("the continuation of a body that never began")
        elif header.control_bytes or not header.payload_bytes:
            raise RemoteProtocolError("a continuation that is none")
        nbytes = header.payload_bytes + (unfinished.nbytes if unfinished else 0)
        # A part that says there is more claims at least one byte beyond itself.
        if nbytes + header.more > limits.max_body_bytes:
            raise RemoteProtocolError(
                f"a body of at least {nbytes + header.more} bytes, "
                f"more than {limits.max_body_bytes}"
            )
        kept = self._unfinished_bytes + header.payload_bytes
        if header.more and kept > max_unfinished_bytes(limits):
            raise RemoteProtocolError(
                f"{kept} bytes of unfinished bodies, "
                f"more than {max_unfinished_bytes(limits)}"
            )

    def _check_control(self, header: Header, unfinished: _Unfinished | None) -> None:
        if unfinished is not None:
            raise RemoteProtocolError("a frame in the middle of its stream's body")
        if header.control_bytes > self.limits.max_control_bytes:
            raise RemoteProtocolError(
                f"{header.control_bytes} bytes of control, "
                f"more than {self.limits.max_control_bytes}"
            )

    def _accept(
        self, header: Header, control: bytes, part: bytes
    ) -> tuple[int, Frame, bytes] | None:
        if header.type == TYPE_CONTROL:
            self._unfinished[header.stream] = _Unfinished(_decode(control), part)
            self._unfinished_bytes += len(part)
            return None
        unfinished = self._unfinished[header.stream]
        unfinished.parts.append(part)
        if header.more:
            unfinished.nbytes += len(part)
            self._unfinished_bytes += len(part)
            return None
        del self._unfinished[header.stream]
        self._unfinished_bytes -= unfinished.nbytes
        return header.stream, unfinished.frame, b"".join(unfinished.parts)


def _decode(control: bytes) -> Frame:
    # Bad UTF-8 is a plain ValueError and deep nesting a RecursionError.
    try:
        return _decoder.decode(control)
    except (msgspec.MsgspecError, ValueError, RecursionError) as exc:
        raise RemoteProtocolError(f"not a frame that we know: {exc}") from exc
