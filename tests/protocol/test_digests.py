from __future__ import annotations

import xxhash
from hypothesis import given, strategies as st

from asynckv.protocol.wire import Digester, digest_of


def test_the_digest_is_xxh3_128() -> None:
    assert digest_of(b"kv") == xxhash.xxh3_128(b"kv").digest()
    assert len(digest_of(b"")) == 16


@given(st.lists(st.binary(max_size=300)))
def test_any_chunking_gives_the_same_digest(pieces: list[bytes]) -> None:
    digester = Digester()
    for piece in pieces:
        digester.update(memoryview(piece))
    assert digester.digest() == digest_of(b"".join(pieces))
    together = Digester()
    together.update_all(memoryview(piece) for piece in pieces)
    assert together.digest() == digester.digest()
