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
import xxhash
from hypothesis import given, strategies as st

from asynckv.errors import RemoteProtocolError
from asynckv.protocol.codec import BODY_PART_BYTES, FrameDecoder, encode_frame
from asynckv.protocol.frames import PROTOCOL_MAJOR, Frame, Get
from asynckv.protocol.values import Contents
from asynckv.protocol.wire import (
    CHUNK_HEADER_BYTES,
    HEADER_BYTES,
    TYPE_CHUNK,
    TYPE_CONTROL,
    WIRE_VERSION,
    Chunk,
    Digester,
    Header,
    check_magic,
    checksum_of,
    decode_chunk_header,
    digest_of,
    encode_chunk_header,
    pack_header,
    parity_of,
    unpack_header,
)
from asynckv.types import TensorSpec


@given(
    st.integers(0, TYPE_CHUNK),
    st.integers(0, 2**32 - 1),
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**32 - 1),
    st.booleans(),
    st.integers(0, 2**64 - 1),
)
def test_a_header_comes_back_as_it_was_packed(
    type_: int, control: int, payload: int, stream: int, more: bool, checksum: int
) -> None:
    packed = pack_header(type_, control, payload, stream, more=more, checksum=checksum)
    assert len(packed) == HEADER_BYTES == 36
    fields = (type_, more, control, payload, stream, checksum)
    assert unpack_header(packed) == Header(*fields)


@given(st.integers(0, 2**32 - 1))
def test_the_parity_of_a_frames_stream_is_in_its_header(stream: int) -> None:
    assert parity_of(pack_header(TYPE_CONTROL, 2, 3, stream)) == stream % 2


@given(st.binary(max_size=300), st.binary(max_size=300), st.integers(0))
def test_each_flipped_bit_of_what_follows_changes_its_checksum(
    control: bytes, payload: bytes, bit: int
) -> None:
    whole = bytearray(control + payload + b"\0")
    bit %= len(whole) * 8
    whole[bit // 8] ^= 1 << bit % 8
    changed = bytes(whole[: len(control)]), bytes(whole[len(control) : -1])
    before = checksum_of(control, payload)
    assert (checksum_of(*changed) == before) == (changed == (control, payload))


def test_a_checksum_tells_control_and_payload_apart() -> None:
    assert checksum_of(b"ab", b"c") != checksum_of(b"a", b"bc")
    assert checksum_of(b"", b"abc") != checksum_of(b"abc")


@pytest.mark.parametrize("bit", range(HEADER_BYTES * 8))
def test_each_flipped_bit_of_a_header_is_refused(bit: int) -> None:
    packed = bytearray(pack_header(TYPE_CONTROL, 17, 4096, 3))
    packed[bit // 8] ^= 1 << bit % 8
    with pytest.raises(RemoteProtocolError):
        unpack_header(packed)


@pytest.mark.parametrize("nbytes", range(HEADER_BYTES))
def test_a_header_that_was_cut_short_is_refused(nbytes: int) -> None:
    with pytest.raises(RemoteProtocolError, match="cut short"):
        unpack_header(pack_header(TYPE_CONTROL, 0, 0)[:nbytes])


def test_a_header_is_read_where_it_begins() -> None:
    data = b"before" + pack_header(TYPE_CONTROL, 1, 2, 3) + b"after"
    assert unpack_header(data, 6) == Header(TYPE_CONTROL, False, 1, 2, 3, 0)
    with pytest.raises(RemoteProtocolError, match="cut short"):
        unpack_header(data, 12)


@pytest.mark.parametrize(
    ("offset", "value", "says"),
    [
        (0, 0x47, "not a frame"),
        (4, 2, "wire version 2"),
        (5, 3, "unknown frame type 3"),
        (7, 2, "unknown frame flags"),
        (35, 0xFF, "checksum"),
    ],
)
def test_the_error_says_what_is_wrong_with_the_header(
    offset: int, value: int, says: str
) -> None:
    packed = bytearray(pack_header(TYPE_CONTROL, 1, 2, 3))
    packed[offset] = value
    with pytest.raises(RemoteProtocolError, match=says):
        unpack_header(packed)


def test_who_speaks_another_version_is_told_what_to_do() -> None:
    packed = bytearray(pack_header(TYPE_CONTROL, 1, 2, 3))
    packed[4] = 2
    with pytest.raises(RemoteProtocolError) as caught:
        unpack_header(packed)
    assert "the same release" in caught.value.hint


def test_who_begins_frames_as_another_release_does_is_told_what_to_do() -> None:
    with pytest.raises(RemoteProtocolError, match="speaks protocol 2, not 1") as caught:
        check_magic(bytearray(b"AKV2"))
    assert "the same release" in caught.value.hint


@pytest.mark.parametrize("nbytes", range(HEADER_BYTES))
def test_the_beginning_of_a_header_is_known_however_short(nbytes: int) -> None:
    check_magic(bytearray(pack_header(TYPE_CONTROL, 0, 0)[:nbytes]))


@pytest.mark.parametrize("foreign", [b"G", b"AK\0", b"GET / HTTP/1.1"])
def test_foreign_bytes_are_told_at_once(foreign: bytes) -> None:
    with pytest.raises(RemoteProtocolError, match="not a frame") as caught:
        check_magic(bytearray(foreign))
    assert "something else" in caught.value.hint


@pytest.mark.parametrize("record", [b"\x16\x03\x01\x02\x00", b"\x15\x03\x03\x00\x02"])
def test_tls_is_told_from_other_foreign_bytes(record: bytes) -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        check_magic(bytearray(record))
    assert "tls://" in caught.value.hint


_BIG = 2**64 - 1


@given(
    st.integers(0, _BIG),
    st.integers(0, 2**32 - 1),
    st.integers(0, _BIG),
    st.integers(1, _BIG),
)
def test_a_chunk_header_comes_back(
    transfer: int, part: int, offset: int, nbytes: int
) -> None:
    data = encode_chunk_header(transfer, part, offset, nbytes)
    assert len(data) == CHUNK_HEADER_BYTES == 56
    assert decode_chunk_header(data) == Chunk(transfer, part, offset, nbytes)


@given(st.binary(max_size=100))
def test_garbage_is_a_protocol_error(garbage: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        decode_chunk_header(garbage)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (encode_chunk_header(1, 2, 3, 4)[:-1], "a chunk header was cut short"),
        (encode_chunk_header(1, 2, 3, 4) + b"x", "a chunk header was cut short"),
        (encode_chunk_header(1, 2, 3, 4)[:35], "a frame header was cut short"),
        (encode_chunk_header(1, 2, 3, 0), "a chunk without bytes"),
        (pack_header(TYPE_CONTROL, 20, 4) + bytes(20), "something else than a chunk"),
        (pack_header(2, 19, 4) + bytes(20), "something else than a chunk"),
        (pack_header(2, 20, 4, stream=1) + bytes(20), "something else than a chunk"),
        (pack_header(2, 20, 4, more=True) + bytes(20), "something else than a chunk"),
        (pack_header(2, 20, 4) + bytes(20), "a chunk header fails its checksum"),
    ],
)
def test_what_is_no_chunk_is_a_protocol_error(data: bytes, says: str) -> None:
    with pytest.raises(RemoteProtocolError, match=says):
        decode_chunk_header(data)


@given(st.integers(0, 56 * 8 - 1))
def test_a_flipped_bit_is_found_in_the_header_and_in_the_place(bit: int) -> None:
    data = bytearray(encode_chunk_header(1, 2, 3, 4))
    data[bit // 8] ^= 1 << bit % 8
    with pytest.raises(RemoteProtocolError):
        decode_chunk_header(data)


def test_the_digest_is_xxh3_128() -> None:
    assert digest_of(b"kv") == xxhash.xxh3_128(b"kv").digest()
    assert len(digest_of(b"")) == 16


@given(st.lists(st.binary(max_size=300)))
def test_any_chunking_gives_the_same_digest(pieces: list[bytes]) -> None:
    digester = Digester()
    for piece in pieces:
        digester.update(memoryview(piece))
    assert digester.digest() == digest_of(b"".join(pieces))


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
