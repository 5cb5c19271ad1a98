"""An entry as the body of a frame: what it holds, its tokens, its small tensors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, TypeAlias

import msgspec

from asynckv.errors import ChecksumError, EntryTooLarge, RemoteProtocolError
from asynckv.observability.lines import as_line
from asynckv.protocol.values import Contents, Place
from asynckv.protocol.wire import digest_of
from asynckv.transfers.layout import Layout, check_dtypes, read_layout
from asynckv.transfers.tokens import Tokens

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
_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(Contents).decode
_decode_places: Final = msgspec.msgpack.Decoder(tuple[Place | None, ...]).decode


def is_eager(nbytes: int) -> bool:
    """Does a part of this size leave with a frame, and not by a lane?"""
    return nbytes <= EAGER_NBYTES


class Manifest(msgspec.Struct, frozen=True, gc=False):
    """A body, read: layout, tokens, and the tensors' bytes if they rode along.

    Of each tensor in the layout there is a digest, which is empty if it is not known.
    """

    layout: Layout
    digests: tuple[bytes, ...]
    input_tokens: Tokens | None
    roi: Tokens | None
    inline: Sequence[memoryview]


def pack(
    layout: Layout,
    digests: Sequence[bytes],
    input_tokens: Tokens | None,
    roi: Tokens | None,
    inline: Iterable[memoryview] = (),
) -> bytes:
    """Return the body of an entry."""
    return _pack(layout.encoded, digests, input_tokens, roi, inline)


def _pack(
    layout: bytes,
    digests: Sequence[bytes],
    input_tokens: Tokens | None,
    roi: Tokens | None,
    inline: Iterable[memoryview] = (),
) -> bytes:
    contents = _encode(
        Contents(
            layout,
            tuple(digests),
            None if input_tokens is None else input_tokens.spec,
            None if roi is None else roi.spec,
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
    layout, digests, tokens, roi, end = _read_head(body)
    pieces = _read_pieces(body, end, layout.sizes if inline else ())
    return Manifest(layout, digests, tokens, roi, pieces)


def unpack_mapped(
    body: bytes, nbytes: int, *, inline: bool = True
) -> tuple[Manifest, Sequence[Place | None]]:
    """Read a body that says, in ``nbytes``, where its tensors lie; nothing is checked.

    Those that lie nowhere are the manifest's ``inline`` ones, if they came along.

    :raises RemoteProtocolError: if it is not exactly what it says
    """
    layout, digests, tokens, roi, end = _read_head(body)
    try:
        places = _decode_places(body[end : end + nbytes])
    except (msgspec.MsgspecError, ValueError, RecursionError) as exc:
        raise RemoteProtocolError(f"an offer's places are broken: {exc}") from exc
    sizes = layout.sizes
    if len(places) != len(sizes):
        raise RemoteProtocolError(f"{len(places)} places for {len(sizes)} tensors")
    others = [n for n, place in zip(sizes, places, strict=True) if place is None]
    pieces = _read_pieces(body, end + nbytes, others if inline else ())
    return Manifest(layout, digests, tokens, roi, pieces), places


_Head: TypeAlias = tuple[Layout, tuple[bytes, ...], Tokens | None, Tokens | None, int]


def _read_head(body: bytes) -> _Head:
    end = _LENGTH_NBYTES + int.from_bytes(body[:_LENGTH_NBYTES], "big")
    try:
        contents = _decode(body[_LENGTH_NBYTES:end])
        layout = read_layout(contents.layout)
        rows = contents.input_tokens, contents.roi
        check_dtypes(spec for spec in rows if spec is not None)
    except (msgspec.MsgspecError, ValueError, RecursionError) as exc:
        raise RemoteProtocolError(f"an entry's manifest is broken: {exc}") from exc
    digests = contents.digests
    if len(digests) != len(layout.sizes):
        raise RemoteProtocolError(
            f"{len(digests)} digests for {len(layout.sizes)} tensors"
        )
    tokens = roi = None
    if (spec := contents.input_tokens) is not None:
        start, end = end, end + spec.nbytes
        tokens = Tokens(body[start:end], spec)
    if (spec := contents.roi) is not None:
        start, end = end, end + spec.nbytes
        roi = Tokens(body[start:end], spec)
    return layout, digests, tokens, roi, end


def _read_pieces(body: bytes, end: int, sizes: Sequence[int]) -> list[memoryview]:
    """Return the bytes of tensors of these sizes, which end the body."""
    pieces: list[memoryview] = []
    if sizes:
        begin, view = end, memoryview(body)[end:]
        if begin > _FEW_NBYTES:  # who keeps a tensor shall not keep the tokens twice
            view = memoryview(bytes(view))
        for nbytes in sizes:
            start, end = end, end + nbytes
            pieces.append(view[start - begin : end - begin])
    if end != len(body):
        raise RemoteProtocolError(
            f"an entry's body holds {len(body)} bytes, its manifest says {end}"
        )
    return pieces


def content_digest(
    layout: Layout,
    digests: Sequence[bytes],
    input_tokens: Tokens | None,
    roi: Tokens | None,
    packed: bytes | None = None,
) -> bytes:
    """Return the digest of a whole entry: layout, digests, tokens and roi.

    The order of its tensors does not matter: names are unique in an entry. ``packed``
    is all that in their order, if it is at hand: of one there is nothing to sort.
    """
    if packed is None or len(digests) > 1:
        digests = [digests[place] for place in layout.by_name]
        packed = _pack(layout.encoded_by_name, digests, input_tokens, roi)
    return digest_of(packed)


def verify(name: str, digest: bytes, found: bytes) -> None:
    """Compare the digest of what arrived with what was announced.

    Empty digests mean that the link carries none.

    :raises ChecksumError: they differ
    """
    if digest and digest != found:
        raise ChecksumError(
            f"{as_line(name)} arrived with other bytes than were sent",
            hint="the delivery was refused; nothing of it was used",
        )


def verify_inline(manifest: Manifest) -> list[bytes]:
    """Digest what rode along, and verify it.

    :raises ChecksumError: some bytes changed on their way
    """
    found: list[bytes] = []
    every = zip(manifest.layout.specs, manifest.digests, manifest.inline, strict=True)
    for name, digest, piece in every:
        found.append(digest_of(piece))
        verify(name, digest, found[-1])
    return found
