"""What a value begins with is read back as it was written, or not at all."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from asynckv.stores.header import (
    MAX_HEADER_NBYTES,
    ForeignHeader,
    ShortHeader,
    ValueHeader,
    ValueName,
    pack_header,
    unpack_header,
)
from asynckv.types import KVFingerprint, TensorSpec

_texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
_names = st.builds(
    ValueName,
    key=_texts,
    fingerprint=st.none() | st.builds(KVFingerprint, model=_texts, ranks=_texts),
    namespace=_texts,
)
_headers = st.builds(
    ValueHeader,
    name=_names,
    spec=st.just(TensorSpec((2, 3), "bfloat16")),
    digest=st.binary(min_size=16, max_size=16),
    epoch=st.integers(0, 2**62),
    expires_at_s=st.none() | st.floats(0, 1e10),
)
HEADER = ValueHeader(
    ValueName("k", KVFingerprint("m"), "t"), TensorSpec((4,), "uint8"), b"d" * 16, 7
)


@given(_headers, st.binary(max_size=40))
def test_a_header_is_read_whatever_follows_it(
    header: ValueHeader, after: bytes
) -> None:
    packed = pack_header(header)
    assert unpack_header(packed + after) == (header, len(packed))


@given(_headers, st.data())
def test_a_header_that_is_cut_says_how_long_it_is_at_least(
    header: ValueHeader, data: st.DataObject
) -> None:
    packed = pack_header(header)
    kept = data.draw(st.integers(0, len(packed) - 1))
    with pytest.raises(ShortHeader) as short:
        unpack_header(packed[:kept])
    assert kept < short.value.needed <= len(packed)


def test_a_header_with_one_changed_bit_is_never_read() -> None:
    for bit in range(8 * len(pack_header(HEADER))):
        packed = bytearray(pack_header(HEADER))
        packed[bit // 8] ^= 1 << bit % 8
        with pytest.raises((ForeignHeader, ShortHeader)):
            unpack_header(bytes(packed))


def test_a_header_longer_than_any_is_refused_before_it_has_come() -> None:
    packed = bytearray(pack_header(HEADER))
    packed[8:12] = (MAX_HEADER_NBYTES).to_bytes(4, "little")
    with pytest.raises(ForeignHeader):
        unpack_header(bytes(packed))


@given(_names, _names)
def test_two_names_are_two_keys_of_a_tier(one: ValueName, other: ValueName) -> None:
    assert (one == other) == (one.tier_key == other.tier_key)


def test_keys_of_one_model_and_namespace_begin_alike() -> None:
    a, b = (ValueName(key, KVFingerprint("m"), "t").tier_key for key in "ab")
    assert a.rsplit("/", 1)[0] == b.rsplit("/", 1)[0]
    assert ValueName("a", None, "t").tier_key.split("/")[2] != a.split("/")[2]
