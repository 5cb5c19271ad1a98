"""The 28 bytes that every frame and every chunk begins with.

Big endian: magic, version, type, flags, control length, payload length,
stream, and a crc32 of all that. The checksum finds a lost place in the byte
stream early; it is no security. Limits are the caller's to check.
"""

from __future__ import annotations

import struct
import zlib
from typing import Final

import msgspec

from asynckv.errors import RemoteProtocolError

__all__ = (
    "FLAG_MORE",
    "HEADER_BYTES",
    "TYPE_CHUNK",
    "TYPE_CONTINUATION",
    "TYPE_CONTROL",
    "WIRE_VERSION",
    "Header",
    "pack_header",
    "unpack_header",
)

WIRE_VERSION: Final = 1
HEADER_BYTES: Final = 28

TYPE_CONTROL: Final = 0
"""A control frame, with the first bytes of its body."""
TYPE_CONTINUATION: Final = 1
"""The next bytes of a body whose frame had :data:`FLAG_MORE`."""
TYPE_CHUNK: Final = 2
"""A chunk of one tensor; on payload lanes only."""

FLAG_MORE: Final = 1
"""The body goes on in a continuation frame of the same stream."""

_MAGIC: Final = b"AKV1"
_FIELDS: Final = struct.Struct("!4sBBHIQI")
_unpack: Final = struct.Struct("!4sBBHIQII").unpack_from


class Header(msgspec.Struct, frozen=True, gc=False):
    """A header whose checksum, type and flags are right; its lengths are claims."""

    type: int
    more: bool
    control_bytes: int
    payload_bytes: int
    stream: int


def pack_header(
    type_: int,
    control_bytes: int,
    payload_bytes: int,
    stream: int = 0,
    *,
    more: bool = False,
) -> bytes:
    """Return the header of a frame of ``control_bytes`` and ``payload_bytes``."""
    flags = FLAG_MORE if more else 0
    fields = _FIELDS.pack(
        _MAGIC, WIRE_VERSION, type_, flags, control_bytes, payload_bytes, stream
    )
    return fields + zlib.crc32(fields).to_bytes(4, "big")


def unpack_header(data: bytes | bytearray | memoryview, offset: int = 0) -> Header:
    """Read the header at ``offset``.

    :raises RemoteProtocolError: it is no header of this version, or was changed
    """
    if len(data) - offset < HEADER_BYTES:
        raise RemoteProtocolError("a frame header was cut short")
    magic, version, type_, flags, control, payload, stream, checksum = _unpack(
        data, offset
    )
    if magic != _MAGIC or version != WIRE_VERSION:
        raise _foreign(magic, version)
    if type_ > TYPE_CHUNK:
        raise RemoteProtocolError(f"unknown frame type {type_}")
    if flags & ~FLAG_MORE:
        raise RemoteProtocolError(f"unknown frame flags {flags:#x}")
    if zlib.crc32(data[offset : offset + _FIELDS.size]) != checksum:
        raise RemoteProtocolError("a frame header fails its checksum")
    return Header(type_, flags == FLAG_MORE, control, payload, stream)


def _foreign(magic: bytes, version: int) -> RemoteProtocolError:
    if magic != _MAGIC:
        return RemoteProtocolError(
            f"not a frame: it begins with {magic!r}",
            hint="is something else than asynckv at that address?",
        )
    return RemoteProtocolError(
        f"wire version {version}, not {WIRE_VERSION}",
        hint="run the same release of asynckv on both sides",
    )
