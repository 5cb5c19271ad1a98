from __future__ import annotations

from typing import Any, Final

import msgspec
import pytest

from asynckv.protocol.frames import Frame
from asynckv.protocol.transfer_frames import (
    DeviceDone,
    DeviceGrant,
    DeviceMet,
    DeviceOffer,
    Devices,
    DeviceSkip,
    DeviceWithdraw,
    MeetDevice,
    OpenDevices,
    PrepareDevice,
)

DECODER = msgspec.msgpack.Decoder[Frame](Frame)
FRAMES: Final[tuple[msgspec.Struct, ...]] = (
    OpenDevices(b""),
    Devices(b""),
    PrepareDevice(),
    MeetDevice(0, b""),
    DeviceMet(0),
    DeviceOffer(0, 0, 0, 0, 0),
    DeviceGrant(0),
    DeviceSkip(0),
    DeviceWithdraw(0),
    DeviceDone(0),
)
COUNT = ((0, -1), (2**62, 2**62 + 1))
BOUNDS: dict[str, tuple[tuple[Any, Any], ...]] = {
    "description": ((b"d" * 4096, b"d" * 4097),),
    "unique_id": ((b"u" * 128, b"u" * 129),),
    "trace": ((b"t" * 64, b"t" * 65),),
    "pipe": ((0, -1), (1, 2)),
    **dict.fromkeys(("number", "transfer", "part", "offset", "nbytes"), COUNT),
}
CASES = [
    pytest.param(frame, field, *bound, id=f"{type(frame).__name__}.{field}-{number}")
    for frame in FRAMES
    for field in frame.__struct_fields__
    for number, bound in enumerate(BOUNDS[field])
]


@pytest.mark.parametrize(("frame", "field", "last", "beyond"), CASES)
def test_a_field_may_reach_its_bound_and_no_further(
    frame: msgspec.Struct, field: str, last: object, beyond: object
) -> None:
    value = msgspec.structs.replace(frame, **{field: last})
    assert DECODER.decode(msgspec.msgpack.encode(value)) == value
    value = msgspec.structs.replace(frame, **{field: beyond})
    with pytest.raises(msgspec.ValidationError):
        DECODER.decode(msgspec.msgpack.encode(value))


def test_a_unique_id_is_shown_to_nobody() -> None:
    frame = MeetDevice(1, b"s3cret")
    assert "s3cret" not in repr(frame)
    assert "pipe=1" in str(frame)
