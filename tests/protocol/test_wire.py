"""The bytes of protocol version 2, as they were written down once.

A change that this finds is a change of the wire: both sides would need it. It takes
another version, or is undone.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from asynckv.protocol.codec import BODY_PART_BYTES, FrameDecoder, encode_frame
from asynckv.protocol.frames import PROTOCOL_MAJOR, Frame, Get
from asynckv.protocol.values import Contents
from asynckv.protocol.wire import WIRE_VERSION, encode_chunk_header
from asynckv.types import TensorSpec

WRITTEN: list[dict[str, Any]] = json.loads(
    Path(__file__).with_name("wire_2.json").read_text()
)


def name_of(written: dict[str, Any]) -> str:
    return str(written["frame"]).partition("(")[0]


def test_every_kind_of_frame_is_written_down() -> None:
    kinds = {kind.__name__ for kind in Frame.__args__}
    assert {name_of(written) for written in WRITTEN} == kinds
    assert (WIRE_VERSION, PROTOCOL_MAJOR) == (1, 2)


@pytest.mark.parametrize("written", WRITTEN, ids=name_of)
def test_a_frame_is_read_and_written_as_it_always_was(written: dict[str, Any]) -> None:
    data = bytes.fromhex(written["bytes"])
    ((stream, frame, body),) = FrameDecoder().feed(data)
    assert (stream, repr(frame)) == (written["stream"], written["frame"])
    assert body == written["body"].encode()
    assert b"".join(encode_frame(stream, frame, body)) == data


def test_the_header_of_a_chunk_is_written_as_it_always_was() -> None:
    assert encode_chunk_header(2**40 + 1, 2, 3 * 2**20, 4 * 2**20) == bytes.fromhex(
        "414b5631 01 02 0000 00000014 0000000000400000 00000000 74a74cba84e0d06b"
        "73cbe615 0000010000000001 00000002 0000000000300000"
    )


def test_a_long_body_goes_on_as_it_always_did() -> None:
    first, last = bytes(BODY_PART_BYTES), b"end"
    data = b"".join(encode_frame(5, Get("key"), first + last))
    assert data == (
        bytes.fromhex(
            "414b5631 01 00 0001 0000000f 0000000000010000 00000005 3040cd67634c9dda"
            "8ae57bf6 82a174a3676574a36b6579a36b6579"
        )
        + first
        + bytes.fromhex(
            "414b5631 01 01 0000 00000000 0000000000000003 00000005 bf77492ac2aa299c"
            "8cf55346"
        )
        + last
    )


def test_a_manifest_is_written_as_it_always_was() -> None:
    encode = msgspec.msgpack.encode
    layout = encode([("0.key", TensorSpec((2, 3), "bfloat16"))])
    assert layout == bytes.fromhex("9192a5302e6b657992920203a862666c6f61743136")
    contents = Contents(layout, (b"d" * 16,), TensorSpec((4,), "int32"))
    assert encode(contents) == (
        bytes.fromhex("94c415")
        + layout
        + bytes.fromhex("91c410")
        + b"d" * 16
        + bytes.fromhex("929104a5696e743332c0")
    )
