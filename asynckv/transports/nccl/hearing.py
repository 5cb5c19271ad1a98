"""Which frame of a device stream is for whom."""

from __future__ import annotations

from asynckv.errors import RemoteProtocolError
from asynckv.protocol.transfer_frames import (
    DeviceDone,
    DeviceFrame,
    DeviceGrant,
    DeviceMet,
    DeviceOffer,
    DeviceReady,
    DeviceSkip,
    DeviceWithdraw,
    MeetDevice,
    PrepareDevice,
)
from asynckv.transports.nccl.connecting import Connector
from asynckv.transports.nccl.receiver import Receiver
from asynckv.transports.nccl.sender import Sender

__all__ = ("hear",)


def hear(
    frame: DeviceFrame, sender: Sender, receiver: Receiver, connector: Connector
) -> None:
    """Hand on what the peer said.

    :raises RemoteProtocolError: it makes no sense
    """
    match frame:
        case DeviceOffer():
            receiver.on_offer(frame)
        case DeviceGrant():
            sender.on_grant(frame)
        case DeviceDone():
            sender.on_done(frame)
        case DeviceSkip():
            sender.on_skip(frame)
        case DeviceWithdraw():
            receiver.on_withdraw(frame)
        case PrepareDevice():
            connector.on_prepare()
        case DeviceReady():
            connector.on_ready()
        case MeetDevice():
            connector.on_meet(frame)
        case DeviceMet():
            connector.on_met(frame)
        case _:
            raise RemoteProtocolError(f"{type(frame).__name__} makes no sense here")
