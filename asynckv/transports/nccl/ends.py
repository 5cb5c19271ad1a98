"""Both ends of a transport's directions, made with what both sides have agreed on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from asynckv.transports.nccl.channel import DeviceChannel
from asynckv.transports.nccl.receiver import Receiver
from asynckv.transports.nccl.sender import Sender
from asynckv.transports.nccl.settings import NcclSettings
from asynckv.transports.nccl.worker import DeviceWorker

__all__ = ("make_ends",)


def make_ends(
    worker: DeviceWorker,
    loop: asyncio.AbstractEventLoop,
    channel: DeviceChannel,
    settings: NcclSettings,
    *,
    peer_chunk_bytes: int,
    settled: Callable[[], None],
) -> tuple[Sender, Receiver]:
    """Return who sends and who receives on this side, by no pipe yet."""
    sender = Sender(
        worker,
        loop,
        chunk_bytes=min(settings.chunk_bytes, peer_chunk_bytes),
        max_bytes=settings.max_bytes,
        timeout_s=settings.timeout_s,
        say=channel.send,
        settled=settled,
    )
    receiver = Receiver(
        worker,
        loop,
        max_operations=settings.max_operations,
        max_bytes=settings.max_bytes,
        timeout_s=settings.timeout_s,
        say=channel.send,
        settled=settled,
    )
    return sender, receiver
