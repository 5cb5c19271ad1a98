"""What a peer says of parts that come to a buffer's GPU otherwise than by its host."""

from __future__ import annotations

from typing import TypeAlias

from asynckv.errors import RemoteProtocolError
from asynckv.links.gpu_arrivals import GpuArrivals
from asynckv.links.ipc_arrivals import IpcArrivals
from asynckv.links.receiving import Reception
from asynckv.protocol.device_frames import SentDevices
from asynckv.protocol.ipc_frames import SentShared
from asynckv.protocol.payload_frames import Done

__all__ = ("PartsOnGpu", "SentOnGpu", "note_sent")

PartsOnGpu: TypeAlias = GpuArrivals | IpcArrivals
"""By NCCL, or read by CUDA IPC where the peer has them."""

SentOnGpu: TypeAlias = SentDevices | SentShared


def note_sent(frame: SentOnGpu, arrivals: PartsOnGpu, reception: Reception) -> None:
    """The peer has sent a part, or says where it lies.

    :raises RemoteProtocolError: it makes no sense, or was granted otherwise
    """
    match frame, arrivals:
        case SentDevices(), GpuArrivals():
            arrivals.sent(frame)
            reception.on_done(Done(frame.transfer, frame.part, frame.digest))
        case SentShared(), IpcArrivals():
            arrivals.sent(frame)
        case _:
            name = type(frame).__name__
            raise RemoteProtocolError(f"a {name} for what was granted otherwise")
