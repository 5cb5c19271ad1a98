"""What a peer may send once it is let in, against decoder and session.

Whatever comes: frames or a ``RemoteProtocolError``, and the same for any way in
which the bytes are cut in pieces.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Final, NamedTuple

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
from asynckv.transfers.manifest import unpack, verify_inline
from harness.fuzzing.corpus import Corpus
from harness.fuzzing.oracle import Target, expect, pieces_of

__all__ = ("WIRE",)

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
