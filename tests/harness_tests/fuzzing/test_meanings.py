from __future__ import annotations

import pytest

from asynckv.protocol.codec import encode_frame
from asynckv.protocol.frames import Frame, Get, Insert, Select
from asynckv.protocol.values import TensorRecord
from asynckv.protocol.wire import digest_of
from asynckv.transfers.manifest import pack
from asynckv.transfers.queries import as_tokens
from asynckv.types import TensorSpec
from harness.fuzzing.meanings import changed_meanings, meaning_of
from harness.fuzzing.recording import Connection, Segment
from harness.fuzzing.wire_frames import WireFrame, split

RECORD = TensorRecord("key", TensorSpec((2, 2), "int8"), digest_of(b"abcd"))
ENTRY = pack([RECORD], as_tokens([7, 8]), as_tokens([1, 0]), [memoryview(b"abcd")])


def wire(frame: Frame, body: bytes = b"") -> WireFrame:
    return next(split(encode_frame(1, frame, body)[0]))


@pytest.mark.parametrize(
    ("before", "after", "meaning"),
    [
        (b"\x07\0\0\0\0\0\0\0", b"\x06\0\0\0\0\0\0\0", "Insert body: tokens"),
        (b"\x01\0\0\0\0\0\0\0", b"\0\0\0\0\0\0\0\0", "Insert body: roi"),
        (b"key", b"kez", "Insert body: a tensor's name"),
        (b"\x92\x02\x02", b"\x92\x04\x01", "Insert body: a tensor's shape"),
        (b"\xa4int8", b"\xa5uint8", "Insert body: a tensor's dtype"),
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
