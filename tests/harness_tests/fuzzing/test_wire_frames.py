from __future__ import annotations

import pytest

from asynckv.errors import RemoteProtocolError
from asynckv.protocol.codec import FrameDecoder, encode_frame
from asynckv.protocol.frames import Get, Select
from asynckv.protocol.wire import (
    TYPE_CONTROL,
    decode_chunk_header,
    encode_chunk_header,
    unpack_header,
)
from harness.fuzzing.wire_frames import resealed, seal, split

SAID = b"".join(
    [*encode_frame(1, Select(has_key=True), bytes(70_000)), *encode_frame(3, Get("k"))]
)


def test_what_was_said_is_split_in_its_frames() -> None:
    frames = list(split(SAID))
    assert [frame.header.stream for frame in frames] == [1, 1, 3]
    assert [frame.start for frame in frames[1:]] == [frame.end for frame in frames[:-1]]
    assert frames[-1].end == len(SAID)


def test_sealed_frames_are_what_they_were() -> None:
    assert b"".join(frame.sealed() for frame in split(SAID)) == SAID
    chunk = encode_chunk_header(1, 2, 3, 4) + b"abcd"
    assert [frame.sealed() for frame in split(chunk)] == [chunk]


def test_a_seal_gets_any_change_past_the_checksums() -> None:
    frame = next(split(encode_frame(1, Get("k"))[0]))
    changed = frame._replace(control=frame.control[:-1] + b"l")
    assert list(FrameDecoder().feed(changed.sealed())) == [(1, Get("l"), b"")]
    chunk = next(split(encode_chunk_header(1, 2, 3, 4) + b"abcd"))
    other = chunk._replace(control=bytes(20)).sealed()
    assert decode_chunk_header(other[:-4]) == (0, 0, 0, 4)


def test_a_seal_holds_also_for_lengths_that_are_lies() -> None:
    lie = seal(TYPE_CONTROL, b"control", b"", claims=(2**32 - 1, 2**64 - 1))
    header = unpack_header(lie)
    assert (header.control_bytes, header.payload_bytes) == (2**32 - 1, 2**64 - 1)


def test_half_a_frame_is_not_split() -> None:
    with pytest.raises(RemoteProtocolError, match="cut short"):
        list(split(SAID[:-1]))
    with pytest.raises(RemoteProtocolError, match="cut short"):
        list(split(seal(TYPE_CONTROL, b"", b"")[:-1]))


def test_changed_bytes_are_sealed_again_as_far_as_they_are_frames() -> None:
    assert resealed(SAID + b"AKV1, and so on") == SAID + b"AKV1, and so on"
    changed = bytearray(SAID)
    changed[40] ^= 1
    changed[-1] ^= 1
    again = resealed(bytes(changed))
    assert b"".join(frame.sealed() for frame in split(again)) == again
    last = list(split(again))[-1]
    assert list(FrameDecoder().feed(last.sealed())) == [(3, Get("j"), b"")]
