"""The 36 bytes that every frame and every chunk begins with.

Big endian: magic, version, type, flags, control length, payload length, stream, a
checksum of what follows, and a crc32 of all that. The crc32 lets lengths be believed
before anything is kept; the checksum finds what changed on its way, be it one token of
a key. Neither is security. Limits are the caller's to check.

A chunk on a payload lane is a frame header of type 2 whose control part is transfer,
part and offset; the bytes themselves follow. Whether they are expected is for the
receiver to judge.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from typing import Final, NamedTuple, TypeAlias

import msgspec
import xxhash

from asynckv.errors import RemoteProtocolError

__all__ = (
    "CHUNK_HEADER_BYTES",
    "CRC32_OFFSET",
    "FLAG_MORE",
    "HEADER_BYTES",
    "PLAIN",
    "TYPE_CHUNK",
    "TYPE_CONTINUATION",
    "TYPE_CONTROL",
    "WIRE_VERSION",
    "Chunk",
    "Digester",
    "Header",
    "check_magic",
    "checksum_of",
    "decode_chunk_header",
    "digest_of",
    "encode_chunk_header",
    "pack_fields",
    "pack_header",
    "parity_of",
    "unpack_fields",
    "unpack_header",
    "xxh3",
)


WIRE_VERSION: Final = 1
HEADER_BYTES: Final = 36

TYPE_CONTROL: Final = 0
"""A control frame, with the first bytes of its body."""
TYPE_CONTINUATION: Final = 1
"""The next bytes of a body whose frame had :data:`FLAG_MORE`."""
TYPE_CHUNK: Final = 2
"""A chunk of one tensor; on payload lanes only."""

FLAG_MORE: Final = 1
"""The body goes on in a continuation frame of the same stream."""

_Buffer: TypeAlias = bytes | bytearray | memoryview

_MAGIC: Final = b"AKV1"
_TLS_RECORDS: Final = (b"\x15", b"\x16")  # alert, handshake
_STREAM_END: Final = 24
xxh3: Final = xxhash.xxh3_64_intdigest
"""64 bits, as a number: of bytes, or seeded with those of what goes before them."""
_pack_beginning: Final = struct.Struct("!4sBBH").pack
_unpack_beginning: Final = struct.Struct("!4sBBH").unpack

PLAIN: Final = _pack_beginning(_MAGIC, WIRE_VERSION, TYPE_CONTROL, 0)
"""How the header of a control frame begins that has its whole body."""

pack_fields: Final = struct.Struct("!8sIQIQ").pack
"""Pack what the crc32 is of: beginning, both lengths, stream, checksum."""
unpack_fields: Final = struct.Struct("!8sIQIQI").unpack_from
"""Unpack these, and the crc32. Nothing is checked."""
CRC32_OFFSET: Final = HEADER_BYTES - 4


class Header(msgspec.Struct, frozen=True, gc=False):
    """A header whose crc32, type and flags are right; the rest are claims."""

    type: int
    more: bool
    control_bytes: int
    payload_bytes: int
    stream: int
    checksum: int


def checksum_of(control: _Buffer, payload: _Buffer = b"") -> int:
    """Return what the header says of what follows it: xxh3, 64 bits.

    Of a chunk only the control part counts: its bytes have a digest of their own.
    """
    checksum = xxh3(control)
    return xxh3(payload, checksum) if payload else checksum


def pack_header(
    type_: int,
    control_bytes: int,
    payload_bytes: int,
    stream: int = 0,
    *,
    more: bool = False,
    checksum: int = 0,
) -> bytes:
    """Return the header of a frame of ``control_bytes`` and ``payload_bytes``.

    ``checksum`` is :func:`checksum_of` them.
    """
    beginning = _pack_beginning(_MAGIC, WIRE_VERSION, type_, FLAG_MORE if more else 0)
    fields = pack_fields(beginning, control_bytes, payload_bytes, stream, checksum)
    return fields + zlib.crc32(fields).to_bytes(4, "big")


def unpack_header(data: _Buffer, offset: int = 0) -> Header:
    """Read the header at ``offset``.

    :raises RemoteProtocolError: it is no header of this version, or was changed
    """
    if len(data) - offset < HEADER_BYTES:
        raise RemoteProtocolError("a frame header was cut short")
    beginning, control, payload, stream, checksum, crc32 = unpack_fields(data, offset)
    magic, version, type_, flags = _unpack_beginning(beginning)
    if magic != _MAGIC or version != WIRE_VERSION:
        raise _foreign(magic, version)
    if type_ > TYPE_CHUNK:
        raise RemoteProtocolError(f"unknown frame type {type_}")
    if flags & ~FLAG_MORE:
        raise RemoteProtocolError(f"unknown frame flags {flags:#x}")
    if zlib.crc32(data[offset : offset + CRC32_OFFSET]) != crc32:
        raise RemoteProtocolError("a frame header fails its checksum")
    return Header(type_, flags == FLAG_MORE, control, payload, stream, checksum)


def check_magic(beginning: bytearray) -> None:
    """Refuse bytes that no header begins with, however few they are.

    :raises RemoteProtocolError: they are not asynckv's
    """
    magic = bytes(beginning[: len(_MAGIC)])
    if not _MAGIC.startswith(magic):
        raise _foreign(magic, WIRE_VERSION)


def parity_of(frame: bytes) -> int:
    """Return 1 for a whole frame of an odd stream that was packed here, else 0."""
    return frame[_STREAM_END - 1] & 1


def _foreign(magic: bytes, version: int) -> RemoteProtocolError:
    if magic != _MAGIC:
        hint = "is something else than asynckv at that address?"
        if magic[:1] in _TLS_RECORDS:
            hint = "it speaks TLS: both sides need a tls:// address"
        if magic[:3] == _MAGIC[:3]:
            return RemoteProtocolError(
                f"it speaks protocol {magic[3:].decode('ascii', 'replace')}, not "
                f"{_MAGIC[3:].decode()}",
                hint="run the same release of asynckv on both sides",
            )
        return RemoteProtocolError(f"not a frame: it begins with {magic!r}", hint=hint)
    return RemoteProtocolError(
        f"wire version {version}, not {WIRE_VERSION}",
        hint="run the same release of asynckv on both sides",
    )


_PLACE: Final = struct.Struct("!QIQ")

CHUNK_HEADER_BYTES: Final = HEADER_BYTES + _PLACE.size


class Chunk(NamedTuple):
    """``nbytes`` of part ``part`` of ``transfer``, from ``offset`` on."""

    transfer: int
    part: int
    offset: int
    nbytes: int


def encode_chunk_header(transfer: int, part: int, offset: int, nbytes: int) -> bytes:
    """Return the 56 bytes that go before the chunk's own."""
    place = _PLACE.pack(transfer, part, offset)
    checksum = checksum_of(place)
    return pack_header(TYPE_CHUNK, _PLACE.size, nbytes, checksum=checksum) + place


def decode_chunk_header(data: bytes | bytearray | memoryview) -> Chunk:
    """Read the 56 bytes that go before a chunk.

    :raises RemoteProtocolError: they are not the header of a chunk that has bytes
    """
    header = unpack_header(data)
    if (header.type, header.control_bytes, header.stream, header.more) != (
        TYPE_CHUNK,
        _PLACE.size,
        0,
        False,
    ):
        raise RemoteProtocolError("something else than a chunk on a payload lane")
    if len(data) != CHUNK_HEADER_BYTES:
        raise RemoteProtocolError("a chunk header was cut short")
    if header.payload_bytes == 0:
        raise RemoteProtocolError("a chunk without bytes")
    if checksum_of(bytes(data[HEADER_BYTES:])) != header.checksum:
        raise RemoteProtocolError("a chunk header fails its checksum")
    transfer, part, offset = _PLACE.unpack_from(data, HEADER_BYTES)
    return Chunk(transfer, part, offset, header.payload_bytes)


digest_of: Final[Callable[[_Buffer], bytes]] = xxhash.xxh3_128_digest
"""Return the 16-byte digest of some bytes, which must be contiguous."""


Digester: TypeAlias = xxhash.xxh3_128
"""The digest of bytes that come in pieces; any chunking gives the same.

``update(piece)`` releases the GIL over a large piece; ``digest()`` is of all so far.
"""
