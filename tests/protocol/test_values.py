from __future__ import annotations

import msgspec
import pytest

from asynckv.protocol import values


def test_a_bounded_field_refuses_more() -> None:
    record = msgspec.msgpack.encode(("x" * 513, ("float32", (1,)), b""))
    with pytest.raises(msgspec.ValidationError, match="length"):
        msgspec.msgpack.decode(record, type=values.TensorRecord)


@pytest.mark.parametrize("name", ["two\nlines", "\x1b[2J", "a\u2028b", "\x00"])
def test_a_peers_name_cannot_write_lines_into_a_log(name: str) -> None:
    identity = msgspec.msgpack.encode({"id": name, "incarnation": "1"})
    with pytest.raises(msgspec.ValidationError, match="regex"):
        msgspec.msgpack.decode(identity, type=values.PeerIdentity)


def test_a_peers_name_may_be_in_any_language() -> None:
    identity = values.PeerIdentity("Größe 東京 🙂", "1")
    encoded = msgspec.msgpack.encode(identity)
    assert msgspec.msgpack.decode(encoded, type=values.PeerIdentity) == identity
