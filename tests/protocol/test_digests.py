from __future__ import annotations

import xxhash
from hypothesis import given, strategies as st

from asynckv.protocol.digests import (
    DIGEST_NBYTES,
    Digester,
    digest_of,
    entry_digest,
)
from asynckv.protocol.frames import TensorRecord
from asynckv.types import TensorSpec

_KEY = TensorRecord("key", TensorSpec((2, 3), "float16"), b"a" * 16)
_VALUE = TensorRecord("value", TensorSpec((2, 3), "float16"), b"b" * 16)


def test_the_digest_is_xxh3_128() -> None:
    assert digest_of(b"kv") == xxhash.xxh3_128(b"kv").digest()
    assert len(digest_of(b"")) == DIGEST_NBYTES


@given(st.lists(st.binary(max_size=300)))
def test_any_chunking_gives_the_same_digest(pieces: list[bytes]) -> None:
    digester = Digester()
    for piece in pieces:
        digester.update(memoryview(piece))
    assert digester.digest() == digest_of(b"".join(pieces))


def test_an_entrys_digest_does_not_depend_on_the_order() -> None:
    assert entry_digest([_KEY, _VALUE]) == entry_digest(iter([_VALUE, _KEY]))


def test_an_entrys_digest_covers_name_dtype_shape_and_digest() -> None:
    spec = _KEY.spec
    variants = [
        _KEY,
        TensorRecord("keys", spec, _KEY.digest),
        TensorRecord("key", TensorSpec((3, 2), "float16"), _KEY.digest),
        TensorRecord("key", TensorSpec((2, 3), "bfloat16"), _KEY.digest),
        TensorRecord("key", spec, b"c" * 16),
        TensorRecord("key", spec),
    ]
    digests = {entry_digest([variant]) for variant in variants}
    assert len(digests) == len(variants)


def test_an_entry_without_tensors_has_a_digest() -> None:
    assert entry_digest([]) != entry_digest([_KEY])
