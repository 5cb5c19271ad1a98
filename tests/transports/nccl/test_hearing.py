from __future__ import annotations

import pytest

from asynckv.errors import RemoteProtocolError
from asynckv.protocol.device_frames import (
    DeviceDone,
    DeviceFrame,
    DeviceGrant,
    DeviceOffer,
    DeviceReady,
    Devices,
    DeviceSkip,
    MeetDevice,
    PrepareDevice,
)
from asynckv.testing.nccl_pairs import NcclPair
from asynckv.transports.nccl.hearing import hear


def hear_on_near(pair: NcclPair, frame: DeviceFrame) -> None:
    near = pair.near
    assert near._connector is not None
    hear(frame, near.sender, near.receiver, near._connector)


@pytest.mark.parametrize(
    "frame",
    [
        Devices(b""),
        DeviceReady(),
        PrepareDevice((2, 2)),
        MeetDevice(0, 2, b"short"),
        DeviceGrant(1, 7),
        DeviceSkip(1, 7),
        DeviceDone(1, 7),
        DeviceOffer(1, 0, 99, 0, 0, 10),
        DeviceOffer(1, 5, 0, 0, 0, 10),
    ],
    ids=lambda frame: type(frame).__name__,
)
async def test_what_makes_no_sense_is_refused(
    pair: NcclPair, frame: DeviceFrame
) -> None:
    with pytest.raises(RemoteProtocolError):
        hear_on_near(pair, frame)


@pytest.mark.parametrize(
    "frame",
    [
        DeviceGrant(7, 0),
        DeviceSkip(7, 0),
        DeviceDone(7, 0),
        DeviceOffer(7, 0, 9, 0, 0, 1),
    ],
    ids=lambda frame: type(frame).__name__,
)
async def test_what_is_said_of_another_generation_is_nothing(
    pair: NcclPair, frame: DeviceFrame
) -> None:
    hear_on_near(pair, frame)
    assert not (pair.near.sender.nbytes or pair.near.receiver.nbytes)
