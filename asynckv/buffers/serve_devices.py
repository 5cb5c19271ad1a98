"""The serving side of one peer's wish to connect its GPU with a buffer's."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from asynckv.errors import AsyncKVError, ConfigError
from asynckv.links.device_streams import DeviceStream
from asynckv.links.gpu_link import GpuLink
from asynckv.links.requests import LinkStream
from asynckv.protocol.device_frames import Devices, OpenDevices
from asynckv.tensors.devices import Device

if TYPE_CHECKING:
    from asynckv.buffers.serve_lookup import LookupService

__all__ = ("serve_devices",)

logger = logging.getLogger(__name__)


def serve_devices(
    service: LookupService, stream: LinkStream, asked: OpenDevices
) -> DeviceStream:
    """Begin to open the other end of what the peer opens; return what hears of it.

    :raises ConfigError: this side has no GPU, or is to use none
    """
    device = service.buffer.open_device
    if device is None or not service.may_use_nccl:
        raise ConfigError("this side has no GPU to send from")
    channel = DeviceStream(answers=True)
    channel.use(stream)
    opening = _open(service, channel, asked, device)
    service.run(opening, "connect GPUs")
    return channel


async def _open(
    service: LookupService,
    channel: DeviceStream,
    asked: OpenDevices,
    device: Device,
) -> None:
    link, way = service.link, None
    try:
        way = await GpuLink.make(link, device, service.map_digest)
        channel.send(Devices(way.transport.describe()))
        service.way = way
        await way.open(way.transport.open(asked.description, channel))
    except (AsyncKVError, OSError, TimeoutError) as exc:
        logger.info("no way from GPU to GPU to %s: %s", link.peer.id, exc)
        channel.refuse(exc)
    if way is not None:
        await way.closed()  # until then the buffer's memory may be sent from
