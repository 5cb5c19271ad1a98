"""The first frame of a connection, as somebody in the middle reads it. No I/O.

It tells a link's control connection (Hello, answered by Welcome) from its payload
lanes (Attach). Whatever is no such frame passes as it came.
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from asynckv.errors import RemoteProtocolError
from asynckv.protocol.codec import FrameDecoder, encode_frame
from asynckv.protocol.frames import Attach, Frame, Hello, Welcome
from asynckv.protocol.handshake import WELCOME_LIMITS
from asynckv.protocol.header import (
    HEADER_BYTES,
    TYPE_CONTROL,
    pack_header,
    unpack_header,
)

__all__ = ("Greeting",)

_MAGIC: Final = pack_header(TYPE_CONTROL, 0, 0)[:4]
_MAX_BYTES: Final = HEADER_BYTES + WELCOME_LIMITS.max_control_bytes


class Greeting:
    """Holds back the first frame that passes until it is whole.

    With ``heartbeat_ms`` the limits that a Hello and its Welcome agree on have
    no longer heartbeat than that.
    """

    def __init__(self, heartbeat_ms: int | None = None) -> None:
        self.kind: Literal["control", "lanes", ""] = ""
        self._heartbeat_ms = heartbeat_ms
        self._held = bytearray()
        self._is_over = False

    def feed(self, data: bytes) -> bytes:
        """Return what may go on now that ``data`` has come."""
        if self._is_over:
            return data
        self._held += data
        if not self._held.startswith(_MAGIC[: len(self._held)]):
            return self.rest()
        if len(self._held) < HEADER_BYTES:
            return b""
        try:
            nbytes = _length_of(self._held)
            if nbytes > len(self._held):
                return b""
            first = self._heard(bytes(self._held[:nbytes]))
        except RemoteProtocolError:
            return self.rest()
        return first + self.rest()[nbytes:]

    def rest(self) -> bytes:
        """Return what was held back; nothing is from now on."""
        self._is_over = True
        rest = bytes(self._held)
        self._held.clear()
        return rest

    def _heard(self, data: bytes) -> bytes:
        frame: Frame
        _, frame, _ = next(FrameDecoder(WELCOME_LIMITS).feed(data))
        if isinstance(frame, Attach):
            self.kind = "lanes"
        elif isinstance(frame, Hello | Welcome):
            self.kind = "control"
            if self._heartbeat_ms is not None:
                return _quickened(frame, self._heartbeat_ms)
        return data


def _length_of(held: bytearray) -> int:
    """Return how long the frame is that begins here.

    :raises RemoteProtocolError: none does, or one that is no greeting
    """
    header = unpack_header(held)
    nbytes = HEADER_BYTES + header.control_bytes
    if header.type != TYPE_CONTROL or header.payload_bytes or nbytes > _MAX_BYTES:
        raise RemoteProtocolError("not a greeting")
    return nbytes


def _quickened(frame: Hello | Welcome, heartbeat_ms: int) -> bytes:
    limits = msgspec.structs.replace(
        frame.limits, heartbeat_ms=min(frame.limits.heartbeat_ms, heartbeat_ms)
    )
    return encode_frame(0, msgspec.structs.replace(frame, limits=limits))[0]
