"""The header of one chunk on a payload lane: where its bytes belong.

A frame header of type 2 whose control part is transfer, part and offset; the
bytes themselves follow. Whether they are expected is for the receiver to judge.
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

from asynckv.errors import RemoteProtocolError
from asynckv.protocol.header import (
    HEADER_BYTES,
    TYPE_CHUNK,
    checksum_of,
    pack_header,
    unpack_header,
)

__all__ = (
    "CHUNK_HEADER_BYTES",
    "Chunk",
    "decode_chunk_header",
    "encode_chunk_header",
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
