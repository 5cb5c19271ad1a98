from __future__ import annotations

from typing import Any

import msgspec
import pytest

from asynckv.protocol import values


def test_a_bounded_field_refuses_more() -> None:
    layout = msgspec.msgpack.encode([("x" * 513, ((1,), "float32"))])
    with pytest.raises(msgspec.ValidationError, match="length"):
        msgspec.msgpack.decode(layout, type=values.NamedSpecs)


@pytest.mark.parametrize(
    ("kind", "last", "beyond"),
    [
        (values.Count, 2**62, 2**62 + 1),
        (values.Count, 0, -1),
        (values.Port, 65535, 65536),
        (values.Port, 1, 0),
        (values.Name, "n" * 512, "n" * 513),
        (values.Id, "i" * 256, "i" * 257),
        (values.Text, "t" * 2048, "t" * 2049),
        (values.Digest, b"d" * 16, b"d" * 17),
        (values.Token, b"t" * 16, b"t" * 17),
        (values.Mac, b"m" * 32, b"m" * 33),
        (
            values.PeerIdentity,
            values.PeerIdentity("i" * 256, "1"),
            values.PeerIdentity("i" * 257, "1"),
        ),
        (
            values.Place,
            values.Place(((0, 1),) * 64, 0, 1),
            values.Place(((0, 1),) * 65, 0, 1),
        ),
    ],
)
def test_a_value_may_reach_its_bound_and_no_further(
    kind: Any, last: object, beyond: object
) -> None:
    encode, decode = msgspec.msgpack.encode, msgspec.msgpack.decode
    assert decode(encode(last), type=kind) == last
    with pytest.raises(msgspec.ValidationError):
        decode(encode(beyond), type=kind)


@pytest.mark.parametrize("name", ["two\nlines", "\x1b[2J", "a\u2028b", "\x00"])
def test_a_peers_name_cannot_write_lines_into_a_log(name: str) -> None:
    identity = msgspec.msgpack.encode({"id": name, "incarnation": "1"})
    with pytest.raises(msgspec.ValidationError, match="regex"):
        msgspec.msgpack.decode(identity, type=values.PeerIdentity)


def test_a_peers_name_may_be_in_any_language() -> None:
    identity = values.PeerIdentity("Größe 東京 🙂", "1")
    encoded = msgspec.msgpack.encode(identity)
    assert msgspec.msgpack.decode(encoded, type=values.PeerIdentity) == identity
