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
from asynckv.testing.blocked import until
from harness.nccl_pairs import NcclPair


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
async def test_what_makes_no_sense_ends_the_transport(
    pair: NcclPair, frame: DeviceFrame
) -> None:
    pair.channels[1].send(frame)
    await until(lambda: bool(pair.lost[0]))
    assert type(pair.lost[0][0]) is RemoteProtocolError
