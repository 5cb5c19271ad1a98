from __future__ import annotations

import pytest

from asynckv.errors import RemoteProtocolError
from asynckv.protocol.transfer_frames import (
    DeviceDone,
    DeviceFrame,
    DeviceGrant,
    DeviceMet,
    DeviceOffer,
    DeviceReady,
    Devices,
    DeviceSkip,
    MeetDevice,
    PrepareDevice,
)
from asynckv.transports.nccl.transport import hear
from harness.nccl_pairs import NcclPair


def hear_on_near(pair: NcclPair, frame: DeviceFrame) -> None:
    near = pair.near
    assert near._connector is not None
    hear(frame, near.sender, near.receiver, near._connector)


@pytest.mark.parametrize(
    "frame",
    [
        Devices(b""),
        DeviceReady(),
        DeviceMet(0),
        PrepareDevice(),
        MeetDevice(0, b"short"),
        DeviceGrant(7),
        DeviceSkip(7),
        DeviceDone(7),
        DeviceOffer(0, 99, 0, 0, 10),
        DeviceOffer(5, 0, 0, 0, 10),
    ],
    ids=lambda frame: type(frame).__name__,
)
async def test_what_makes_no_sense_is_refused(
    pair: NcclPair, frame: DeviceFrame
) -> None:
    with pytest.raises(RemoteProtocolError):
        hear_on_near(pair, frame)
