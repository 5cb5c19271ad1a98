from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from asynckv.errors import RemoteProtocolError
from asynckv.protocol.header import (
    HEADER_BYTES,
    TYPE_CHUNK,
    TYPE_CONTROL,
    Header,
    pack_header,
    unpack_header,
)


@given(
    st.integers(0, TYPE_CHUNK),
    st.integers(0, 2**32 - 1),
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**32 - 1),
    st.booleans(),
)
def test_a_header_comes_back_as_it_was_packed(
    type_: int, control: int, payload: int, stream: int, more: bool
) -> None:
    packed = pack_header(type_, control, payload, stream, more=more)
    assert len(packed) == HEADER_BYTES
    assert unpack_header(packed) == Header(type_, more, control, payload, stream)


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
    assert unpack_header(data, 6) == Header(TYPE_CONTROL, False, 1, 2, 3)


@pytest.mark.parametrize(
    ("offset", "value", "says"),
    [
        (0, 0x47, "not a frame"),
        (4, 2, "wire version 2"),
        (5, 3, "unknown frame type 3"),
        (7, 2, "unknown frame flags"),
        (27, 0xFF, "checksum"),
    ],
)
def test_the_error_says_what_is_wrong_with_the_header(
    offset: int, value: int, says: str
) -> None:
    packed = bytearray(pack_header(TYPE_CONTROL, 1, 2, 3))
    packed[offset] = value
    with pytest.raises(RemoteProtocolError, match=says):
        unpack_header(packed)
