from __future__ import annotations

import msgspec
import pytest

from asynckv.protocol import frames, values


@pytest.mark.parametrize("name", ["Contents", "Limits", "PeerIdentity", "TensorRecord"])
def test_frames_offers_what_it_is_made_of(name: str) -> None:
    assert getattr(frames, name) is getattr(values, name)


def test_a_bounded_field_refuses_more() -> None:
    record = msgspec.msgpack.encode(("x" * 513, ("float32", (1,)), b""))
    with pytest.raises(msgspec.ValidationError, match="length"):
        msgspec.msgpack.decode(record, type=values.TensorRecord)
