"""What was recorded is cut and changed everywhere; who does not notice is found."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from asynckv.protocol import codec, wire as chunks
from asynckv.protocol.codec import FrameDecoder, encode_frame
from asynckv.protocol.frames import Attach, Frame, Get, Insert, Result, Select
from asynckv.protocol.transfer_frames import DeviceFrame, OpenDevices
from asynckv.protocol.wire import decode_chunk_header, digest_of, encode_chunk_header
from asynckv.transfers.tokens import as_tokens
from asynckv.types import TensorSpec
from harness.fuzzing import replaying
from harness.fuzzing.corpus import Finding
from harness.fuzzing.recording import Connection, Segment
from harness.fuzzing.replaying import (
    changed_meanings,
    check_chunk_flips,
    check_control_flips,
    check_cuts,
    flips_of,
    meaning_of,
)
from harness.fuzzing.scenes import record, record_gpus
from harness.fuzzing.wire_frames import WireFrame, split
from harness.raw_inserts import body_with

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


async def test_all_scenes_play_to_their_end() -> None:
    recording = await record()
    assert {connection.is_lane for connection in recording.connections} == {True, False}
    assert len({type(frame) for frame, _ in recording.frames()}) > 40


async def test_every_frame_between_gpus_is_said() -> None:
    recording = await record_gpus()
    said = {type(frame) for frame, _ in recording.frames()}
    assert {OpenDevices, *DeviceFrame.__args__} <= said


def test_every_cut_and_every_flip_is_tried() -> None:
    rng = random.Random(1)
    nbytes = sum(len(segment.data) for segment in CONTROL.segments)
    assert check_cuts(CONTROL) == nbytes
    assert check_control_flips(CONTROL, rng) == (nbytes - 4) * 8 + 4
    assert check_chunk_flips(LANE, rng) == 56 * 8 + 3


def test_a_flip_changes_one_bit_of_its_frame() -> None:
    data, frame = LANE.said(to_listener=True), LANE.frames(to_listener=True)[1]
    before = int.from_bytes(data[frame.start :], "big")
    changed = [flip.applied(data[frame.start :]) for flip in flips_of(frame, rng())]
    bits = {(int.from_bytes(one, "big") ^ before).bit_count() for one in changed}
    assert bits == {1}


def rng() -> random.Random:
    return random.Random(1)


class Anything(int):
    def __ne__(self, other: object) -> bool:
        return False


def looks_at_no_checksum(patch: pytest.MonkeyPatch) -> None:
    for module, name in (
        (codec, "checksum_of"),
        (codec, "xxh3"),
        (chunks, "checksum_of"),
    ):
        patch.setattr(module, name, lambda *_: Anything())


def hears_no_single_byte(patch: pytest.MonkeyPatch) -> None:
    def late(self: FrameDecoder, data: bytes) -> list[Any]:
        return list(feed(self, data)) if len(data) > 1 else []

    feed = FrameDecoder.feed
    patch.setattr(FrameDecoder, "feed", late)


@pytest.mark.parametrize(
    ("break_it", "check", "match"),
    [
        (
            looks_at_no_checksum,
            lambda: check_control_flips(CONTROL, rng()),
            "a changed frame was taken",
        ),
        (
            looks_at_no_checksum,
            lambda: check_chunk_flips(LANE, rng()),
            "a changed chunk header was taken",
        ),
        (
            lambda patch: patch.setattr(replaying, "digest_of", lambda _: b"equal"),
            lambda: check_chunk_flips(LANE, rng()),
            "a changed tensor has its digest",
        ),
        (
            lambda patch: patch.setattr(FrameDecoder, "is_idle", True),
            lambda: check_cuts(CONTROL),
            "an end not noticed",
        ),
        (hears_no_single_byte, lambda: check_cuts(CONTROL), None),
    ],
)
def test_what_is_not_noticed_is_found(
    break_it: Callable[[pytest.MonkeyPatch], None],
    check: Callable[[], int],
    match: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    break_it(monkeypatch)
    with pytest.raises(Finding, match=match):
        check()


def wire(frame: Frame, body: bytes = b"") -> WireFrame:
    return next(split(encode_frame(1, frame, body)[0]))


ENTRY = body_with(
    {"0.key": TensorSpec((2, 2), "int8")},
    [memoryview(b"abcd")],
    digests=[digest_of(b"abcd")],
    tokens=as_tokens([7, 8]),
    roi=as_tokens([1, 0]),
)
INSERT, GET = wire(Insert("e", 1, inline=True), ENTRY), wire(Get("name"))


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
    body = ENTRY.replace(before, after, 1)
    longer = len(body) - len(ENTRY)
    body = (int.from_bytes(body[:4], "big") + longer).to_bytes(4, "big") + body[4:]
    assert meaning_of(INSERT, INSERT.control, body) == meaning


@pytest.mark.parametrize(
    ("frame", "control", "body", "meaning"),
    [
        (GET, wire(Get("mane")).control, b"", "Get.key"),
        (GET, wire(Select(has_key=False)).control, b"", "Get becomes Select"),
        (GET, b"\xc1", b"", ""),
        (GET, GET.control, b"", ""),
        (wire(Select(has_key=True), bytes(8)), None, bytes(7) + b"1", "Select body"),
    ],
)
def test_what_a_changed_frame_means(
    frame: WireFrame, control: bytes | None, body: bytes, meaning: str
) -> None:
    assert meaning_of(frame, control or frame.control, body) == meaning


def test_every_bit_of_a_connection_is_changed() -> None:
    data = encode_frame(1, Get("name"))[0]
    meanings = changed_meanings(Connection(0, (Segment(0, True, data),)))
    assert set(meanings) == {"Get.key"}
    assert 8 <= meanings.total() <= 32


def test_a_seal_gets_any_change_past_the_checksums() -> None:
    changed = wire(Get("k"))._replace(control=wire(Get("l")).control)
    assert list(FrameDecoder().feed(changed.sealed())) == [(1, Get("l"), b"")]
    chunk = next(split(encode_chunk_header(1, 2, 3, 4) + b"abcd"))
    other = chunk._replace(control=bytes(20)).sealed()
    assert decode_chunk_header(other[:-4]) == (0, 0, 0, 4)
