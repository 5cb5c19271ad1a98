from __future__ import annotations

import pytest

from asynckv.protocol.codec import encode_frame
from asynckv.protocol.frames import Frame, Get, Insert, Select
from asynckv.protocol.wire import digest_of
from asynckv.transfers.queries import as_tokens
from asynckv.types import TensorSpec
from harness.bodies import body_with
from harness.fuzzing.meanings import changed_meanings, meaning_of
from harness.fuzzing.recording import Connection, Segment
from harness.fuzzing.wire_frames import WireFrame, split

ENTRY = body_with(
    {"0.key": TensorSpec((2, 2), "int8")},
    [memoryview(b"abcd")],
    digests=[digest_of(b"abcd")],
    tokens=as_tokens([7, 8]),
    roi=as_tokens([1, 0]),
)


def wire(frame: Frame, body: bytes = b"") -> WireFrame:
    return next(split(encode_frame(1, frame, body)[0]))


@pytest.mark.parametrize(
    ("before", "after", "meaning"),
    [
        (b"\x07\0\0\0\0\0\0\0", b"\x06\0\0\0\0\0\0\0", "Insert body: tokens"),
        (b"\x01\0\0\0\0\0\0\0", b"\0\0\0\0\0\0\0\0", "Insert body: roi"),
        (b"0.key", b"1.key", "Insert body: a tensor's name"),
        (b"0.key", b"0.kez", ""),
        (b"\x92\x02\x02", b"\x92\x04\x01", "Insert body: a tensor's shape"),
        (b"\xa4int8", b"\xa4bool", "Insert body: a tensor's dtype"),
        (b"abcd", b"abce", ""),
        (b"\x92\x02\x02", b"\x92\x02\x03", ""),
    ],
)
def test_what_a_changed_entry_means(before: bytes, after: bytes, meaning: str) -> None:
    frame = wire(Insert("e", 1, inline=True), ENTRY)
    body = ENTRY.replace(before, after, 1)
    longer = len(body) - len(ENTRY)
    body = (int.from_bytes(body[:4], "big") + longer).to_bytes(4, "big") + body[4:]
    assert meaning_of(frame, frame.control, body) == meaning


def test_what_a_changed_frame_means() -> None:
    get, select = wire(Get("name")), wire(Select(has_key=True), bytes(8))
    assert meaning_of(get, wire(Get("mane")).control, b"") == "Get.key"
    assert meaning_of(get, wire(Select(has_key=False)).control, b"") == (
        "Get becomes Select"
    )
    assert meaning_of(get, b"\xc1", b"") == ""
    assert meaning_of(get, get.control, b"") == ""
    assert meaning_of(select, select.control, bytes(7) + b"1") == "Select body"


def test_every_bit_of_a_connection_is_changed() -> None:
    data = encode_frame(1, Get("name"))[0]
    meanings = changed_meanings(Connection(0, (Segment(0, True, data),)))
    assert set(meanings) == {"Get.key"}
    assert 8 <= meanings.total() <= 32
