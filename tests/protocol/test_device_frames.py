from __future__ import annotations

import msgspec
import pytest

from asynckv.protocol.device_frames import (
    DeviceBroken,
    DeviceOffer,
    MeetDevice,
    OpenDevices,
    PrepareDevice,
)
from asynckv.protocol.frames import Frame

DECODER = msgspec.msgpack.Decoder[Frame](Frame)


@pytest.mark.parametrize(
    "frame",
    [
        OpenDevices(b"d" * 4097),
        MeetDevice(0, 1, b"u" * 129),
        DeviceBroken(2, 1),
        DeviceBroken(-1, 1),
        DeviceOffer(1, 0, 0, 0, 0, -1),
        PrepareDevice((1, 2, 3)),  # type: ignore[arg-type]
    ],
)
def test_what_cannot_be_is_refused(frame: Frame) -> None:
    with pytest.raises(msgspec.ValidationError):
        DECODER.decode(msgspec.msgpack.encode(frame))


def test_a_unique_id_is_shown_to_nobody() -> None:
    frame = MeetDevice(0, 1, b"s3cret")
    assert "s3cret" not in repr(frame)
    assert "generation=1" in str(frame)
