"""Each oracle can fail: a decoder that breaks a promise is found."""

from __future__ import annotations

import random

import pytest

from asynckv.protocol import codec, wire as chunks
from asynckv.protocol.codec import FrameDecoder, encode_frame
from asynckv.protocol.frames import Attach, Get, Insert, Result
from asynckv.protocol.wire import encode_chunk_header
from harness.fuzzing import replaying
from harness.fuzzing.oracle import Finding
from harness.fuzzing.recording import Connection, Segment
from harness.fuzzing.replaying import (
    check_chunk_flips,
    check_control_flips,
    check_cuts,
    flips_of,
)

ASKED = [*encode_frame(1, Get("k")), *encode_frame(3, Insert("e", 1, True), b"body")]
CONTROL = Connection(
    0,
    (
        Segment(0, True, b"".join(ASKED)),
        Segment(0, False, encode_frame(1, Result(1))[0]),
    ),
)
LANE = Connection(
    1,
    (
        Segment(1, True, encode_frame(0, Attach(b"token", 0))[0]),
        Segment(1, True, encode_chunk_header(1, 0, 0, 3) + b"abc"),
    ),
)


def test_every_cut_and_every_flip_is_tried() -> None:
    rng = random.Random(1)
    nbytes = sum(len(segment.data) for segment in CONTROL.segments)
    assert check_cuts(CONTROL) == nbytes
    assert check_control_flips(CONTROL, rng) == (nbytes - 4) * 8 + 4
    assert check_chunk_flips(LANE, rng) == 56 * 8 + 3


def test_a_flip_changes_one_bit_of_its_frame() -> None:
    data = LANE.said(to_listener=True)
    frame = LANE.frames(to_listener=True)[1]
    for flip in flips_of(frame, random.Random(1)):
        changed = flip.applied(data[frame.start :])
        other = int.from_bytes(changed, "big") ^ int.from_bytes(
            data[frame.start :], "big"
        )
        assert other.bit_count() == 1


def test_a_decoder_that_looks_at_no_checksum_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Anything(int):
        def __ne__(self, other: object) -> bool:
            return False

    monkeypatch.setattr(codec, "checksum_of", lambda *_: Anything())
    monkeypatch.setattr(codec, "xxh3", lambda *_: Anything())
    monkeypatch.setattr(chunks, "checksum_of", lambda *_: Anything())
    with pytest.raises(Finding, match="a changed frame was taken"):
        check_control_flips(CONTROL, random.Random(1))
    with pytest.raises(Finding, match="a changed chunk header was taken"):
        check_chunk_flips(LANE, random.Random(1))


def test_a_digest_of_nothing_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replaying, "digest_of", lambda _: b"equal")
    with pytest.raises(Finding, match="a changed tensor has its digest"):
        check_chunk_flips(LANE, random.Random(1))


def test_an_end_that_is_not_noticed_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FrameDecoder, "is_idle", True)
    with pytest.raises(Finding, match="an end not noticed"):
        check_cuts(CONTROL)


def test_a_frame_that_comes_too_late_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    feed = FrameDecoder.feed
    monkeypatch.setattr(
        FrameDecoder,
        "feed",
        lambda self, data: list(feed(self, data)) if len(data) > 1 else [],
    )
    with pytest.raises(Finding):
        check_cuts(CONTROL)
