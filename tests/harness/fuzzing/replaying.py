"""Recorded connections, heard again: cut anywhere, or with one bit changed.

Nothing here does I/O: the real decoder, sessions, chunk parser and digests hear
what was recorded. And what a changed bit would mean if no checksum found it.
"""

from __future__ import annotations

import collections
import random
from collections.abc import Iterator
from typing import Final, NamedTuple, get_args

import msgspec

from asynckv.errors import ChecksumError, RemoteProtocolError
from asynckv.protocol.codec import FrameDecoder
from asynckv.protocol.frames import (
    Attach,
    Attached,
    Challenge,
    Frame,
    Hello,
    Insert,
    Offer,
    OpeningFrame,
    Proof,
    Refuse,
    Welcome,
)
from asynckv.protocol.session import Session
from asynckv.protocol.values import Limits
from asynckv.protocol.wire import (
    CHUNK_HEADER_BYTES,
    TYPE_CHUNK,
    decode_chunk_header,
    digest_of,
)
from asynckv.transfers.manifest import Manifest, unpack, verify_inline
from harness.fuzzing.corpus import expect
from harness.fuzzing.recording import Connection
from harness.fuzzing.wire_frames import WireFrame

__all__ = (
    "Flip",
    "changed_meanings",
    "check_chunk_flips",
    "check_control_flips",
    "check_cuts",
    "flips_of",
    "meaning_of",
)


_GREETING: Final = (Hello, Challenge, Proof, Welcome, Attach, Attached, Refuse)
_OPENING: Final = frozenset(get_args(OpeningFrame))


class Flip(NamedTuple):
    """One bit of one wire frame that changes on its way."""

    frame: WireFrame
    place: int
    bit: int

    def applied(self, data: bytes) -> bytes:
        """Return ``data``, the frame's bytes, with that bit changed."""
        changed = bytearray(data)
        changed[self.place] ^= 1 << self.bit
        return bytes(changed)


def flips_of(frame: WireFrame, rng: random.Random) -> Iterator[Flip]:
    """Yield each bit of header and control part, and one of each other byte."""
    careful = frame.payload_start - frame.start
    for place in range(frame.end - frame.start):
        bits = range(8) if place < careful else (rng.randrange(8),)
        for bit in bits:
            yield Flip(frame, place, bit)


# Control connections.


class _Ends:
    """Both sides of a recorded connection, as their sessions are."""

    def __init__(self) -> None:
        self.sessions = {
            to_listener: Session[int](Limits(), dialled=not to_listener)
            for to_listener in (True, False)
        }
        self._mirrors = {True: FrameDecoder(), False: FrameDecoder()}

    def hear(self, data: bytes, *, to_listener: bool) -> list[object]:
        """Let one side hear, and the other have said; return the events."""
        speaker = self.sessions[not to_listener]
        for stream, frame, body in self._mirrors[to_listener].feed(data):
            if type(frame) in _OPENING:
                opened = speaker.open(stream, frame, body)  # type: ignore[arg-type]
                expect(opened == stream, "opened out of order", opened, stream)
            elif stream:
                speaker.send(stream, frame, body)
        return list(self.sessions[to_listener].receive(data))


def check_cuts(connection: Connection) -> int:
    """Let both sides hear a control connection byte by byte: return how many cuts.

    Whatever has come before a cut is what the uncut connection says, and whether
    the end comes between two frames is known.

    :raises Finding: something else was heard, or an end within a frame not noticed
    """
    whole, ends = _Ends(), _Ends()
    edges = {way: _edges_of(connection, way) for way in (True, False)}
    # They come before there is a session; a target of their own cuts them.
    greetings = {way: _greeting_bytes(connection, way) for way in (True, False)}
    said, count = {True: 0, False: 0}, 0
    for segment in connection.segments:
        way, start = segment.to_listener, said[segment.to_listener]
        greeting = min(max(greetings[way] - start, 0), len(segment.data))
        data = segment.data[greeting:]
        said[way] += greeting
        heard: list[object] = []
        for i in range(len(data)):
            heard += ends.hear(data[i : i + 1], to_listener=way)
            said[way] += 1
            is_cut = said[way] not in edges[way]
            is_between = ends.sessions[way].is_between_frames
            expect(is_between != is_cut, "an end not noticed", said, way)
            count += 1
        expected = whole.hear(data, to_listener=way)
        expect(heard == expected, "other events, byte by byte", heard, expected)
    return count


def _greeting_bytes(connection: Connection, to_listener: bool) -> int:
    decoder, end = FrameDecoder(), 0
    for frame in connection.frames(to_listener=to_listener):
        heard = list(decoder.feed(frame.sealed()))
        if not heard or not isinstance(heard[0][1], _GREETING):
            break
        end = frame.end
    return end


def _edges_of(connection: Connection, to_listener: bool) -> set[int]:
    """Return where a side may hang up: between whole bodies."""
    ends: set[int] = set()
    unfinished: set[int] = set()
    for frame in connection.frames(to_listener=to_listener):
        stream = frame.header.stream
        unfinished.add(stream) if frame.header.more else unfinished.discard(stream)
        if not unfinished:
            ends.add(frame.end)
    return ends


def check_control_flips(connection: Connection, rng: random.Random) -> int:
    """Let no changed bit pass for a frame: return how many were tried.

    :raises Finding: the changed frame was taken
    """
    count = 0
    for to_listener in (True, False):
        said = connection.said(to_listener=to_listener)
        body_start = 0
        for frame in connection.frames(to_listener=to_listener):
            if frame.control:
                body_start = frame.start
            before, data = said[body_start : frame.start], said[frame.start : frame.end]
            for flip in flips_of(frame, rng):
                count += 1
                heard = _receive(before, flip.applied(data))
                expect(heard is None, "a changed frame was taken", flip, heard)
    return count


def _receive(before: bytes, changed: bytes) -> list[tuple[int, Frame, bytes]] | None:
    decoder = FrameDecoder()
    if before:
        list(decoder.feed(before))
    try:
        return list(decoder.feed(changed))
    except RemoteProtocolError:
        return None


# Lanes.


def check_chunk_flips(connection: Connection, rng: random.Random) -> int:
    """Let no changed bit of a lane become part of a tensor: return how many.

    A change in a header is refused; one in a tensor's bytes changes its digest.

    :raises Finding: neither happened
    """
    count = 0
    for to_listener in (True, False):
        chunks = [
            frame
            for frame in connection.frames(to_listener=to_listener)
            if frame.header.type == TYPE_CHUNK
        ]
        for chunk in chunks:
            count += _check_chunk(chunk, rng)
    return count


def _check_chunk(frame: WireFrame, rng: random.Random) -> int:
    header, payload = frame.sealed()[:CHUNK_HEADER_BYTES], bytearray(frame.payload)
    whole = digest_of(payload)
    count = 0
    for flip in flips_of(frame, rng):
        count += 1
        if flip.place < CHUNK_HEADER_BYTES:
            is_refused = _is_refused(flip.applied(header))
            expect(is_refused, "a changed chunk header was taken", flip)
            continue
        place = flip.place - CHUNK_HEADER_BYTES
        payload[place] ^= 1 << flip.bit
        expect(digest_of(payload) != whole, "a changed tensor has its digest", flip)
        payload[place] ^= 1 << flip.bit
    return count


def _is_refused(header: bytes) -> bool:
    try:
        decode_chunk_header(header)
    except RemoteProtocolError:
        return True
    return False


_decode: Final = msgspec.msgpack.Decoder[Frame](Frame).decode


def changed_meanings(connection: Connection) -> collections.Counter[str]:
    """Count, by what it changes, each bit that would pass for something else."""
    return collections.Counter(
        meaning
        for to_listener in (True, False)
        for frame in connection.frames(to_listener=to_listener)
        if frame.control and not frame.header.more
        for control, payload in _flipped(frame)
        if (meaning := meaning_of(frame, control, payload))
    )


def _flipped(frame: WireFrame) -> Iterator[tuple[bytes, bytes]]:
    data, control_bytes = frame.control + frame.payload, len(frame.control)
    for place in range(len(data)):
        for bit in range(8):
            changed = bytearray(data)
            changed[place] ^= 1 << bit
            yield bytes(changed[:control_bytes]), bytes(changed[control_bytes:])


def meaning_of(frame: WireFrame, control: bytes, payload: bytes) -> str:
    """Return what differs if ``frame`` arrives like that, or ``""`` if it is found.

    Found by the types and bounds of the fields, by the sizes in a manifest, or
    by the digests of tensors that ride along: all there is but the checksums.
    """
    sent = _decode(frame.control)
    try:
        came = _decode(control)
        if isinstance(came, Insert | Offer):
            manifest = unpack(payload, inline=came.inline)
            if came.inline:
                verify_inline(manifest)
    except (msgspec.MsgspecError, ValueError, RemoteProtocolError, ChecksumError):
        return ""
    name = type(sent).__name__
    if type(came) is not type(sent):
        return f"{name} becomes {type(came).__name__}"
    if came != sent:
        return f"{name}.{_difference(sent, came)}"
    if payload == frame.payload:
        return ""
    if isinstance(sent, Insert | Offer):
        before = unpack(frame.payload, inline=sent.inline)
        return f"{name} body: {_difference_of_entries(before, manifest)}"
    return f"{name} body"


def _difference(sent: msgspec.Struct, came: msgspec.Struct) -> str:
    fields = sent.__struct_fields__
    return next(f for f in fields if getattr(sent, f) != getattr(came, f))


def _difference_of_entries(sent: Manifest, came: Manifest) -> str:
    for name, before, after in (
        ("tokens", sent.input_tokens, came.input_tokens),
        ("roi", sent.roi, came.roi),
    ):
        if before != after:
            return name
    if sent.digests != came.digests:
        return "a tensor's digest"
    specs = zip(sent.layout.specs.items(), came.layout.specs.items(), strict=True)
    for (name, spec), (other_name, other) in specs:
        if spec != other:
            return f"a tensor's {_difference(spec, other)}"
        if name != other_name:
            return "a tensor's name"
    return "a tensor's bytes"
