from __future__ import annotations

import msgspec
import pytest

from asynckv.protocol.frames import Frame
from asynckv.protocol.transfer_frames import MAX_RIDERS, Riders

DECODER = msgspec.msgpack.Decoder[Frame](Frame)


@pytest.mark.parametrize("count", [0, MAX_RIDERS])
def test_some_parts_ride_with_a_frame(count: int) -> None:
    riders = Riders(1, tuple(range(count)), (b"d" * 16,) * count)
    assert DECODER.decode(msgspec.msgpack.encode(riders)) == riders


@pytest.mark.parametrize(
    "frame",
    [
        Riders(1, (0,) * (MAX_RIDERS + 1)),
        Riders(1, (), (b"",) * (MAX_RIDERS + 1)),
        Riders(1, (0,), (b"d" * 17,)),
        Riders(1, (-1,)),
    ],
    ids=["parts", "digests", "a digest", "a part"],
)
def test_more_than_can_be_is_refused(frame: Riders) -> None:
    with pytest.raises(msgspec.ValidationError):
        DECODER.decode(msgspec.msgpack.encode(frame))
