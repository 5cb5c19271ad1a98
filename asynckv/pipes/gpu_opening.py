"""How a pipe's GPUs are connected: beside the pipe, and nobody waits for it.

If both sides have the same GPU each reads the other's memory, else NCCL is the way.
Nothing fails without it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from functools import partial

from asynckv.errors import AsyncKVError, ConfigError
from asynckv.links.device_streams import DeviceStream, ask_devices
from asynckv.links.gpu_link import GpuLink
from asynckv.links.link import Link
from asynckv.pipes.gpu_sharing import AGREE_S, GpuSharing
from asynckv.pipes.sharing_stream import SharingStream
from asynckv.protocol.device_frames import Devices, OpenDevices
from asynckv.protocol.handshake import DigestMode
from asynckv.tensors.devices import Device
from asynckv.tensors.growth import Growth
from asynckv.transports.nccl.environment import DeviceDescription, check_peer

__all__ = ("GpuOpening",)

logger = logging.getLogger(__name__)


class GpuOpening:
    """Opens what leads from a pipe's GPU to its peer's.

    ``memory`` of the GPU is allocated when the peer's goes with it, and ``failed`` is
    called when nothing leads there. ``digest`` is what this side wants to be compared.
    """

    def __init__(
        self,
        link: Link,
        device: Device,
        memory: Growth,
        sharing: GpuSharing,
        digest: DigestMode,
        *,
        failed: Callable[[], None],
    ) -> None:
        self._link, self._device, self._digest = link, device, digest
        self._memory, self._sharing, self._failed = memory, sharing, failed
        self._way: GpuLink | None = None
        self._openings: set[asyncio.Task[None]] = set()
        self._has_told = False
        self._is_asked = asyncio.Event()

    @property
    def way(self) -> GpuLink | None:
        """What moves payload between two GPUs, while it does."""
        way = self._way
        return way if way is not None and way.is_open else None

    @property
    def agreed_way(self) -> GpuLink | None:
        """That, also while only the peer knows that it is open, or this side that it
        is over.
        """
        return self._way

    def ask(self) -> None:
        """Open the way: this side begins. Never waits."""
        self._open(self._ask)

    def answer(self, channel: DeviceStream, frame: OpenDevices) -> None:
        """Open the way that the peer has asked for. Never waits."""
        self._open(partial(self._answer, channel, frame))
        self._is_asked.set()

    def share(self, stream: SharingStream, uuid: str) -> None:
        """Share memory with the peer, which has asked for that GPU's. Never waits."""
        self._open(partial(self._share, stream, uuid))

    async def settled(self) -> None:
        """Wait until the way is open, or is known not to be."""
        while self._openings:
            await asyncio.wait(set(self._openings))

    async def let_meet(self) -> None:
        """Let both GPUs' workers meet that are about to, for 1 s. Shielded.

        To be called before the link is closed: the peer's could wait for this one in a
        call that nobody can end.
        """
        if self._way is not None and self._way.is_opening:
            await self._way.aclose()

    def abort(self) -> None:
        """Open nothing more, and close what is open. Never waits."""
        for opening in self._openings:
            opening.cancel()
        self.close()

    async def wait_closed(self) -> None:
        """Wait until what was aborted is over: :meth:`abort` comes first."""
        await self.settled()
        if self._way is not None:
            await self._way.aclose()

    def close(self) -> None:
        """Close the way, unless it is being opened. Never waits."""
        if self._way is not None and not self._way.is_opening:
            self._way.close()  # else it is over with its opening, which nobody wants

    def _open(self, opening: Callable[[], Awaitable[None]]) -> None:
        task = asyncio.get_running_loop().create_task(
            self._try(opening), name=f"asynckv: connect GPUs with {self._link.peer.id}"
        )
        self._openings.add(task)
        task.add_done_callback(self._openings.discard)

    async def _try(self, opening: Callable[[], Awaitable[None]]) -> None:
        try:
            await opening()
        except (AsyncKVError, OSError, TimeoutError) as exc:
            self._failed()
            if self._link.is_open and not self._has_told:
                self._has_told = True
                logger.info(
                    "payload of the pipe to %s goes through host memory: %s",
                    self._link.peer.id,
                    str(exc) or "no answer in time",
                )

    async def _ask(self) -> None:
        if not (reason := await self._sharing.ask()):
            return
        try:
            await self._ask_nccl()
        except (AsyncKVError, OSError, TimeoutError) as exc:
            why = str(exc) or "no answer in time"
            raise ConfigError(f"{why}; nor by CUDA IPC: {reason}") from exc

    async def _share(self, stream: SharingStream, uuid: str) -> None:
        if reason := self._sharing.why_not(uuid):
            # Not the end of it: NCCL may be asked for, and is then soon.
            stream.leave(ConfigError(reason))
            self._link.call_when_lost(lambda _: self._is_asked.set())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(AGREE_S):
                    await self._is_asked.wait()
        else:
            await self._sharing.answer(stream)

    async def _ask_nccl(self) -> None:
        way = await self._make_way()
        channel = ask_devices(self._link, way.transport)
        try:
            # Whenever it accepts the pipe: that is bounded by the link's life.
            description = await channel.description()
            await self._allocate_for(way, description)
            await way.open(way.transport.open(description, channel))
        except BaseException:
            channel.detach()
            raise

    async def _answer(self, channel: DeviceStream, frame: OpenDevices) -> None:
        try:
            way = await self._make_way()
            await self._allocate_for(way, frame.description)
            channel.send(Devices(way.transport.describe()))
            await way.open(way.transport.open(frame.description, channel))
        except Exception as exc:
            channel.refuse(exc)
            raise
        except BaseException:
            channel.detach()
            raise

    async def _make_way(self) -> GpuLink:
        self._way = await GpuLink.make(self._link, self._device, self._digest)
        return self._way

    async def _allocate_for(self, way: GpuLink, description: bytes) -> None:
        """Allocate the memory of the GPU, unless the peer's goes not with this one."""
        own = DeviceDescription.decode(way.transport.describe())
        check_peer(own, DeviceDescription.decode(description))
        await self._memory.open()
