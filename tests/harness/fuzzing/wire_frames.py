"""Wire frames taken apart and put together again, with checksums that are right.

A change that is sealed gets past the checksums, to where the meaning is judged.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import NamedTuple

from asynckv.errors import RemoteProtocolError
from asynckv.protocol.wire import (
    HEADER_BYTES,
    TYPE_CHUNK,
    Header,
    checksum_of,
    pack_header,
    unpack_header,
)

__all__ = ("WireFrame", "resealed", "seal", "split")


class WireFrame(NamedTuple):
    """One frame or chunk of a recorded connection, and where it begins there."""

    start: int
    header: Header
    control: bytes
    payload: bytes

    @property
    def payload_start(self) -> int:
        """Where header and control part end."""
        return self.start + HEADER_BYTES + len(self.control)

    @property
    def end(self) -> int:
        """Where the next frame begins."""
        return self.payload_start + len(self.payload)

    def sealed(self) -> bytes:
        """Return its bytes, with checksums that fit control part and payload."""
        header = self.header
        return seal(
            header.type, self.control, self.payload, header.stream, more=header.more
        )


def seal(
    type_: int,
    control: bytes,
    payload: bytes,
    stream: int = 0,
    *,
    more: bool = False,
    claims: tuple[int, int] | None = None,
) -> bytes:
    """Return a frame or chunk around any bytes; its checksums are right.

    ``claims``: how long the header says that control part and payload are.
    """
    control_bytes, payload_bytes = claims or (len(control), len(payload))
    header = pack_header(
        type_ & 0xFF,
        control_bytes & 0xFFFFFFFF,
        payload_bytes & (2**64 - 1),
        stream & 0xFFFFFFFF,
        more=more,
        checksum=checksum_of(control, b"" if type_ == TYPE_CHUNK else payload),
    )
    return header + control + payload


def split(data: bytes) -> Iterator[WireFrame]:
    """Yield the frames of what one side sent on one connection.

    :raises RemoteProtocolError: it does not consist of whole frames
    """
    start = 0
    while start < len(data):
        header = unpack_header(data, start)
        control_start = start + HEADER_BYTES
        payload_start = control_start + header.control_bytes
        end = payload_start + header.payload_bytes
        if end > len(data):
            raise RemoteProtocolError("the last frame was cut short")
        control, payload = data[control_start:payload_start], data[payload_start:end]
        yield WireFrame(start, header, control, payload)
        start = end


def resealed(data: bytes) -> bytes:
    """Return ``data`` with checksums that fit, as far as it looks like frames.

    For who changes bytes without knowing what they are.
    """
    found, start = [], 0
    while len(data) - start >= HEADER_BYTES:
        header = data[start : start + HEADER_BYTES]
        control_start = start + HEADER_BYTES
        payload_start = control_start + int.from_bytes(header[8:12], "big")
        end = payload_start + int.from_bytes(header[12:20], "big")
        if end > len(data):
            break
        control, payload = data[control_start:payload_start], data[payload_start:end]
        covered = b"" if header[5] == TYPE_CHUNK else payload
        fields = header[:24] + checksum_of(control, covered).to_bytes(8, "big")
        found += [fields, zlib.crc32(fields).to_bytes(4, "big"), control, payload]
        start = end
    return b"".join([*found, data[start:]])
