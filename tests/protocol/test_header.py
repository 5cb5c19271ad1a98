from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from asynckv.errors import RemoteProtocolError
from asynckv.protocol.wire import (
    HEADER_BYTES,
    TYPE_CHUNK,
    TYPE_CONTROL,
    Header,
    check_magic,
    checksum_of,
    pack_header,
    parity_of,
    unpack_header,
)


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
