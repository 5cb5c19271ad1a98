"""An entry as the body of a frame: what it holds, its tokens, its small tensors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Final

import msgspec

from asynckv.errors import ChecksumError, EntryTooLarge, RemoteProtocolError
from asynckv.observability.lines import as_line
from asynckv.protocol.values import Contents, Place, TensorRecord
from asynckv.protocol.wire import digest_of
from asynckv.tensors.views import MISSING_DTYPES, dtype_of
from asynckv.transfers.queries import Tokens
from asynckv.types import TensorSpec

__all__ = (
    "EAGER_NBYTES",
    "INLINE_NBYTES",
    "Manifest",
    "check_body",
    "content_digest",
    "is_eager",
    "pack",
    "unpack",
    "unpack_mapped",
    "verify",
    "verify_inline",
)


INLINE_NBYTES: Final = 64 * 1024
"""Tensors of so many bytes in all ride with their frame."""

EAGER_NBYTES: Final = 16 * 1024
"""A part of so many bytes leaves with the frame that says so.

On a lane it would cost both sides a wake-up of a thread and a frame of its own. The
rule is one of size alone, so that both sides know by which route a part goes.
"""

_LENGTH_NBYTES: Final = 4
_FEW_NBYTES: Final = 1024
_name_of: Final = attrgetter("name")
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Contents)
_decode: Final = _decoder.decode
_decode_places: Final = msgspec.msgpack.Decoder(tuple[Place | None, ...]).decode


def is_eager(nbytes: int) -> bool:
    """Does a part of this size leave with a frame, and not by a lane?"""
    return nbytes <= EAGER_NBYTES


class Manifest(msgspec.Struct, frozen=True, gc=False):
    """A body, read: records, tokens, and the tensors' bytes if they rode along."""

    records: tuple[TensorRecord, ...]
    input_tokens: Tokens | None
    roi: Tokens | None
    inline: Sequence[memoryview]

    @property
    def specs(self) -> dict[str, TensorSpec]:
        return {record.name: record.spec for record in self.records}

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors, without tokens and roi."""
        return sum(record.spec.nbytes for record in self.records)


def pack(
    records: Sequence[TensorRecord],
    input_tokens: Tokens | None,
    roi: Tokens | None,
    inline: Iterable[memoryview] = (),
) -> bytes:
    """Return the body of an entry."""
    contents = _encoder.encode(
        Contents(
            tensors=tuple(records),
            input_tokens=None if input_tokens is None else input_tokens.spec,
            roi=None if roi is None else roi.spec,
        )
    )
    length = len(contents).to_bytes(_LENGTH_NBYTES, "big")
    token_bytes = b"" if input_tokens is None else input_tokens.data
    roi_bytes = b"" if roi is None else roi.data
    return b"".join((length, contents, token_bytes, roi_bytes, *inline))


def check_body(max_body_bytes: int, body: bytes) -> None:
    """Refuse a body that the link cannot carry.

    :raises EntryTooLarge: tokens, roi and names are longer than that
    """
    if len(body) > max_body_bytes:
        raise EntryTooLarge(
            nbytes=len(body),
            max_bytes=max_body_bytes,
            hint="tokens, roi and names of an entry ride in one frame",
        )


def unpack(body: bytes, *, inline: bool) -> Manifest:
    """Read a body that a peer sent.

    :raises RemoteProtocolError: if it is not exactly what it says
    """
    contents, tokens, roi, end = _read_head(body)
    records = contents.tensors
    pieces = _read_pieces(body, end, records if inline else ())
    return Manifest(records, tokens, roi, pieces)


def unpack_mapped(
    body: bytes, nbytes: int, *, inline: bool = True
) -> tuple[Manifest, Sequence[Place | None]]:
    """Read a body that says, in ``nbytes``, where its tensors lie; nothing is checked.

    Those that lie nowhere are the manifest's ``inline`` ones, if they came along.

    :raises RemoteProtocolError: if it is not exactly what it says
    """
    contents, tokens, roi, end = _read_head(body)
    try:
        places = _decode_places(body[end : end + nbytes])
    except (msgspec.MsgspecError, ValueError, RecursionError) as exc:
        raise RemoteProtocolError(f"an offer's places are broken: {exc}") from exc
    records = contents.tensors
    if len(places) != len(records):
        raise RemoteProtocolError(f"{len(places)} places for {len(records)} tensors")
    others = [r for r, place in zip(records, places, strict=True) if place is None]
    pieces = _read_pieces(body, end + nbytes, others if inline else ())
    return Manifest(records, tokens, roi, pieces), places


def _read_head(body: bytes) -> tuple[Contents, Tokens | None, Tokens | None, int]:
    end = _LENGTH_NBYTES + int.from_bytes(body[:_LENGTH_NBYTES], "big")
    try:
        contents = _decode(body[_LENGTH_NBYTES:end])
        if MISSING_DTYPES:
            _check_dtypes(contents)
    except (msgspec.MsgspecError, ValueError, RecursionError) as exc:
        raise RemoteProtocolError(f"an entry's manifest is broken: {exc}") from exc
    records = contents.tensors
    if len(records) > 1 and len({record.name for record in records}) != len(records):
        raise RemoteProtocolError("an entry's manifest names a tensor twice")
    tokens = roi = None
    if (spec := contents.input_tokens) is not None:
        start, end = end, end + spec.nbytes
        tokens = Tokens(body[start:end], spec)
    if (spec := contents.roi) is not None:
        start, end = end, end + spec.nbytes
        roi = Tokens(body[start:end], spec)
    return contents, tokens, roi, end


def _read_pieces(
    body: bytes, end: int, records: Sequence[TensorRecord]
) -> list[memoryview]:
    """Return the bytes of these tensors, which end the body."""
    pieces: list[memoryview] = []
    if records:
        begin, view = end, memoryview(body)[end:]
        if begin > _FEW_NBYTES:  # who keeps a tensor shall not keep the tokens twice
            view = memoryview(bytes(view))
        for record in records:
            start, end = end, end + record.spec.nbytes
            pieces.append(view[start - begin : end - begin])
    if end != len(body):
        raise RemoteProtocolError(
            f"an entry's body holds {len(body)} bytes, its manifest says {end}"
        )
    return pieces


def _check_dtypes(contents: Contents) -> None:
    for spec in (contents.input_tokens, contents.roi):
        if spec is not None:
            dtype_of(spec.dtype)
    for record in contents.tensors:
        dtype_of(record.spec.dtype)


def content_digest(
    records: Sequence[TensorRecord],
    input_tokens: Tokens | None,
    roi: Tokens | None,
    packed: bytes | None = None,
) -> bytes:
    """Return the digest of a whole entry: records, tokens and roi.

    The order of ``records`` does not matter: names are unique in an entry. ``packed``
    are they in their order, if that is at hand: of one there is nothing to sort.
    """
    if packed is None or len(records) > 1:
        packed = pack(sorted(records, key=_name_of), input_tokens, roi)
    return digest_of(packed)


def verify(record: TensorRecord, found: bytes) -> None:
    """Compare the digest of what arrived with what was announced.

    Empty digests mean that the link carries none.

    :raises ChecksumError: they differ
    """
    if record.digest and record.digest != found:
        raise ChecksumError(
            f"{as_line(record.name)} arrived with other bytes than were sent",
            hint="the delivery was refused; nothing of it was used",
        )


def verify_inline(manifest: Manifest) -> list[bytes]:
    """Digest what rode along, and verify it.

    :raises ChecksumError: some bytes changed on their way
    """
    digests: list[bytes] = []
    for record, piece in zip(manifest.records, manifest.inline, strict=True):
        digest = digest_of(piece)
        verify(record, digest)
        digests.append(digest)
    return digests
