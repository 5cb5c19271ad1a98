from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from asynckv.errors import RemoteProtocolError
from asynckv.protocol.wire import (
    CHUNK_HEADER_BYTES,
    TYPE_CONTROL,
    Chunk,
    decode_chunk_header,
    encode_chunk_header,
    pack_header,
)

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
