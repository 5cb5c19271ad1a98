"""What comes behind the frames: chunk headers on lanes, and entries in bodies."""

from __future__ import annotations

import random
import struct
from typing import Final

import msgspec

from asynckv.errors import ChecksumError, RemoteProtocolError
from asynckv.protocol.wire import (
    CHUNK_HEADER_BYTES,
    TYPE_CHUNK,
    decode_chunk_header,
    encode_chunk_header,
)
from asynckv.transfers.manifest import (
    Manifest,
    check_names,
    content_digest,
    pack,
    read_layout,
    unpack,
    verify_inline,
)
from asynckv.transfers.tokens import check_mask, check_tokens
from asynckv.transports.parts import Part, PartTable
from harness.fuzzing.corpus import Corpus
from harness.fuzzing.mutations import change_bytes, change_tree
from harness.fuzzing.oracle import Target, expect
from harness.fuzzing.wire_frames import seal

__all__ = ("CHUNKS", "MANIFEST")

_PLACE: Final = struct.Struct("!QIQ")
_LENGTH_NBYTES: Final = 4
# Transfer 1 has two parts, of transfer 2 nothing is waited for any more.
_PART_NBYTES: Final = 100
_ANNOUNCED: Final = 2


def _make_chunks(rng: random.Random, corpus: Corpus) -> bytes:
    headers = []
    for _ in range(rng.randrange(1, 5)):
        header = encode_chunk_header(
            rng.choice((1, 1, 1, 2, 3)),
            rng.choice((0, 0, 1, 2)),
            rng.choice((0, 0, 40, 60, 99, 100, 2**64 - 1)),
            rng.choice((0, 1, 40, 60, 100, 101, 2**22, 2**64 - 1)),
        )
        if rng.random() < 0.2:
            control = change_bytes(header[-_PLACE.size :], rng)
            header = seal(TYPE_CHUNK, control, b"", rng.choice((0, 0, 1)))
        headers.append(change_bytes(header, rng) if rng.random() < 0.3 else header)
    return b"".join(headers)


def _check_chunks(data: bytes) -> None:
    """Chunks land where the next bytes of a part belong, or are refused."""
    table = PartTable()
    memory = [memoryview(bytearray(_PART_NBYTES)) for _ in range(2)]
    for number, view in enumerate(memory):
        table.add(Part(1, number, view, lambda digest, error: None, b""))
    table.announce(_ANNOUNCED)
    landed = [0, 0]
    try:
        for start in range(0, len(data), CHUNK_HEADER_BYTES):
            chunk = decode_chunk_header(data[start : start + CHUNK_HEADER_BYTES])
            part = table.enter(chunk, "lane")
            if part is None:
                expect(chunk.transfer <= _ANNOUNCED, "never announced", chunk)
                continue
            expect(chunk.transfer == 1 and chunk.part < 2, "no such part", chunk)
            expect(chunk.offset == landed[chunk.part], "not the next bytes", chunk)
            landed[chunk.part] += chunk.nbytes
            expect(landed[chunk.part] <= _PART_NBYTES, "beyond its memory", chunk)
            part.moved_bytes += chunk.nbytes
            table.leave(part, "lane")
    except RemoteProtocolError:
        pass


def _make_manifest(rng: random.Random, corpus: Corpus) -> bytes:
    while True:
        name, item = rng.choice(corpus.frames)
        if name in ("Insert", "Offer"):
            break
    body = item.payload
    if rng.random() < 0.8:
        end = _LENGTH_NBYTES + int.from_bytes(body[:_LENGTH_NBYTES], "big")
        contents = body[_LENGTH_NBYTES:end]
        if rng.random() < 0.5:  # the layout is bytes in it
            layout, *others = msgspec.msgpack.decode(contents)
            contents = msgspec.msgpack.encode([change_tree(layout, rng), *others])
        else:
            contents = change_tree(contents, rng)
        length = len(contents).to_bytes(_LENGTH_NBYTES, "big")
        body = length + contents + body[end:]
    for _ in range(rng.choice((0, 0, 1, 2))):
        body = change_bytes(body, rng)
    return bytes((rng.getrandbits(1),)) + body


def _check_manifest(data: bytes) -> None:
    """An entry's body is exactly what it says, or refused."""
    is_inline, body = bool(data[:1] == b"\1"), data[1:]
    try:
        manifest = unpack(body, inline=is_inline)
    except RemoteProtocolError:
        return
    _check_sizes(manifest, is_inline)
    tokens, roi = manifest.input_tokens, manifest.roi
    layout, digests = manifest.layout, manifest.digests
    packed = pack(layout, digests, tokens, roi, manifest.inline)
    again = unpack(packed, inline=is_inline)
    expect(again == manifest, "not the same when sent on", manifest, again)
    expect(read_layout(layout.encoded) == layout, "another layout", layout)
    check_names(layout.specs)
    content_digest(layout, digests, tokens, roi)
    try:
        if tokens is not None:
            check_tokens(tokens)
        if roi is not None:
            check_mask(roi, tokens)
        if is_inline:
            verify_inline(manifest)
    except (ValueError, ChecksumError):
        pass


def _check_sizes(manifest: Manifest, is_inline: bool) -> None:
    for row in (manifest.input_tokens, manifest.roi):
        if row is not None:
            expect(len(row.data) == row.spec.nbytes, "tokens cut short", row.spec)
    specs, digests = manifest.layout.specs, manifest.digests
    expect(len(specs) == len(digests), "not a digest a tensor", manifest)
    for spec, piece in zip(specs.values(), manifest.inline, strict=is_inline):
        expect(piece.nbytes == spec.nbytes, "a tensor cut short", spec)


CHUNKS: Final = Target("chunks", _make_chunks, _check_chunks)
MANIFEST: Final = Target("manifest", _make_manifest, _check_manifest)
