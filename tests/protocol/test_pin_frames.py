from __future__ import annotations

import msgspec
import pytest

from asynckv.protocol.frames import Frame, Pin, Pinned

DECODER = msgspec.msgpack.Decoder[Frame](Frame)


def test_a_pin_survives_the_wire() -> None:
    for frame in (Pin(("a", "b")), Pinned((True, False))):
        assert DECODER.decode(msgspec.msgpack.encode(frame)) == frame


@pytest.mark.parametrize(
    "frame", [Pin(("a",) * 4097), Pin(("a" * 513,)), Pinned((True,) * 4097)]
)
def test_what_is_longer_than_it_can_be_is_refused(frame: Frame) -> None:
    with pytest.raises(msgspec.ValidationError):
        DECODER.decode(msgspec.msgpack.encode(frame))
