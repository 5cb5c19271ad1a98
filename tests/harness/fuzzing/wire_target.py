"""What a peer may send once it is let in: frames, chunks on lanes, entries in bodies.

Whatever comes: frames or a ``RemoteProtocolError``, and the same for any way in
which the bytes are cut in pieces.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Iterable
from typing import Final, NamedTuple

import msgspec

from asynckv.buffers.serving.select import query_of
from asynckv.errors import ChecksumError, RemoteProtocolError
from asynckv.protocol.codec import FrameDecoder, encode_frame
from asynckv.protocol.failures import from_failure
from asynckv.protocol.frames import (
    Failure,
    Frame,
    Get,
    Insert,
    Offer,
    OpeningFrame,
    OpenPipe,
    Peek,
    Result,
    Select,
)
from asynckv.protocol.session import Came, Opened, Refused, Session
from asynckv.protocol.values import Limits
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
from harness.fuzzing.corpus import Corpus, Target, expect, pieces_of
from harness.fuzzing.mutations import change_bytes, change_tree
from harness.fuzzing.wire_frames import seal

__all__ = (
    "CHUNKS",
    "MANIFEST",
    "WIRE",
)


# Of a session that has asked for something; the others have not.
_OWN: Final[tuple[OpeningFrame, ...]] = (
    Select(has_key=False),
    OpenPipe(),
    Insert("e", 1, inline=False, streaming=True),
    Get("k"),
)
_LIMITS: Final = (
    Limits(),
    Limits(max_control_bytes=4096, max_body_bytes=2**16, max_streams=2),
    Limits(max_control_bytes=4096, max_body_bytes=2**17, max_streams=6),
)


class _Heard(NamedTuple):
    """What a session made of some bytes."""

    events: list[object]
    error: str
    said: bytes
    is_between_frames: bool


def _make(rng: random.Random, corpus: Corpus) -> bytes:
    choice = rng.getrandbits(8)
    return bytes((choice,)) + corpus.hostile(rng, opener=2 if choice & 1 else 1)


def _check(data: bytes) -> None:
    choice, stream = data[0] if data else 0, data[1:]
    whole = _receive(choice, (stream,))
    cut = _receive(choice, pieces_of(stream))
    expect(cut.events == whole.events, "another split, other events", whole, cut)
    expect(cut == whole, "another split, another outcome", whole, cut)
    for event in whole.events:
        if isinstance(event, Opened | Came):
            _check_event(event.frame, event.body)


def _receive(choice: int, pieces: Iterable[bytes]) -> _Heard:
    limits = _LIMITS[(choice >> 1) % len(_LIMITS)]
    session: Session[int] = Session(limits, dialled=bool(choice & 1))
    if (own := choice >> 4) < len(_OWN):
        session.open(own, _OWN[own])
        session.outbox.clear()
    events: list[object] = []
    error = ""
    try:
        for piece in pieces:
            for event in session.receive(piece):
                events.append(str(event.error) if type(event) is Refused else event)
                _answer(session, event)
    except RemoteProtocolError as exc:
        error = type(exc).__name__
    said = session.outbox.take(2**30)
    return _Heard(events, error, said, bool(error) or session.is_between_frames)


def _answer(session: Session[int], event: object) -> None:
    """Do as a service does: attach, answer, or forget."""
    if not isinstance(event, Opened):
        return
    if isinstance(event.frame, Get | Peek):
        session.send(event.stream, Result())
    elif event.stream % 3:
        session.attach(event.stream, event.stream)
    else:
        session.close(event.stream)


def _check_event(frame: Frame, body: bytes) -> None:
    """What is above the session may refuse a frame, but not fall over it."""
    encoded = b"".join(encode_frame(1, frame, body))
    (again,) = FrameDecoder().feed(encoded)
    expect(again == (1, frame, body), "not the same when sent on", frame, again)
    try:
        match frame:
            case Insert() | Offer():
                manifest = unpack(body, inline=frame.inline)
                if frame.inline:
                    verify_inline(manifest)
            case Select():
                query_of(frame, body)
            case Failure():
                error = from_failure(frame)
                expect(bool(str(error)) or not frame.message, "no words", frame)
    except (RemoteProtocolError, ChecksumError):
        pass


WIRE: Final = Target("wire", _make, _check)


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
