"""What one side of a pipe has on its GPU: memory there, and a way to the peer's GPU.

If that is the same one, both sides read each other's memory, else NCCL is the way. It
is opened beside the pipe. Until it is open, and when it is lost, payload goes through
the memory of the hosts: nobody waits for it, and nothing fails without it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from functools import partial

import anyio
import torch

from asynckv.errors import AsyncKVError, ConfigError
from asynckv.links.device_streams import DeviceStream, ask_devices
from asynckv.links.gpu_arrivals import GpuArrivals
from asynckv.links.gpu_link import GpuLink
from asynckv.links.link import Link
from asynckv.links.options import Digest, device_digest, map_digest
from asynckv.pipes.gpu_sharing import AGREE_S, LEAST_NBYTES, GpuSharing
from asynckv.pipes.sharing_stream import SharingStream
from asynckv.protocol.device_frames import Devices, OpenDevices
from asynckv.protocol.handshake import DigestMode
from asynckv.tensors.cuda import DeviceMemory
from asynckv.tensors.device_copying import DeviceCopyPool
from asynckv.tensors.device_regions import DeviceRegion
from asynckv.tensors.growth import Growth
from asynckv.tensors.on_gpu import KVOnGpu, caught
from asynckv.tensors.open_device import OpenDevice
from asynckv.tensors.paged_arena import PagedArena
from asynckv.transports.nccl.environment import DeviceDescription, check_peer
from asynckv.types import TensorSpec

__all__ = ("GpuSide",)

logger = logging.getLogger(__name__)


class GpuSide:
    """One allocation for both directions of a pipe together: twice ``max_bytes``.

    So what is sent and what is received has room there, and what the application has
    of it too unless that is much: without room torch allocates, for which CUDA may wait
    for the peer. Where there is less memory it is less.

    ``digest`` is the pipe's option. What has no room here goes through host memory.
    """

    def __init__(
        self, link: Link, opened: OpenDevice, max_bytes: int, digest: Digest
    ) -> None:
        self.digest: DigestMode = device_digest(digest)
        """What this side wants to be compared of what goes from GPU to GPU."""
        self._link = link
        self._device = opened.device
        self._tensors = opened.gpus.tensors
        max_nbytes = max(2 * max_bytes, LEAST_NBYTES)
        self._growth = Growth(max_nbytes, device=opened.device)
        self.pool = DeviceCopyPool(
            *(opened.device, lambda: opened.gpus), empty=self._growth.lending.spare
        )
        if (pages := self._growth.device_pages) is not None:
            pages.call_when_dropped(self.pool.lanes.close)
        self.sharing = GpuSharing(
            *(link, opened.uuid, self._growth, self.pool, map_digest(digest))
        )
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

    def spare(self, nbytes: int) -> DeviceRegion | None:
        """Take memory of the GPU, if there is so much now. Never waits."""
        arena, pages = self._growth.arena, self._growth.device_pages
        if pages is None or not pages.is_open or not isinstance(arena, PagedArena):
            return None
        region = arena.take_spare(max(nbytes, 1))
        return region if isinstance(region, DeviceRegion) else None

    def spare_for(self, source: object, nbytes: int) -> DeviceRegion | None:
        """Take memory for what is sent from there, where it is to; as :meth:`spare`."""
        if isinstance(source, KVOnGpu):
            is_near = source.memory.device == self._device.index
            has_way = is_near and (self.sharing.is_open or self.way is not None)
        else:  # from the host NCCL takes it by itself
            has_way = self.sharing.is_open
        return self.spare(nbytes) if has_way else None

    async def copied(
        self, source: torch.Tensor | KVOnGpu, place: DeviceMemory
    ) -> bytes:
        """Copy what is to be sent; return what the peer compares, if that is due now.

        A cancelled call ends when nothing is at either place.

        :raises GPUFailed: the GPU failed
        """
        if self.sharing.is_open:
            return await self.sharing.copy(source, place)
        await self.pool.copy([source], [place], digest=False)
        return b""

    def arrivals(self) -> GpuArrivals | None:
        """Return by what one tensor may come from the peer's GPU."""
        return None if self.way is None else GpuArrivals(self.way, self.pool)

    def made(self, spec: TensorSpec) -> KVOnGpu | None:
        """Make a tensor for the application, where there is room. Never waits.

        Its memory comes back with its last view.
        """
        region = self.spare(spec.nbytes)
        return None if region is None else caught(_lent(region, spec), self._tensors)

    async def taken(
        self, region: DeviceRegion, spec: TensorSpec, into: torch.Tensor | None
    ) -> torch.Tensor:
        """Return what has landed there, for the application; or copy it ``into``.

        A cancelled call ends when no GPU and no thread is at ``into``.

        :raises GPUFailed: the GPU failed
        """
        if into is None:
            return _lent(region, spec)
        target = self.pool.catch(into, is_written=True)
        await self.pool.copy([region.place(spec)], [target], digest=False)
        return into

    def abort(self) -> None:
        """Move nothing more, and give the memory back soon. Never waits."""
        for opening in self._openings:
            opening.cancel()
        self._close()

    async def let_meet(self) -> None:
        """Let both GPUs' workers meet that are about to, for 1 s. Shielded.

        To be called before the link is closed: the peer's could wait for this one in a
        call that nobody can end.
        """
        if self._way is not None and self._way.is_opening:
            await self._way.aclose()

    async def aclose(self) -> None:
        """As :meth:`abort`, and wait for it: about 5 s at most. Shielded.

        Tensors that the application has keep the memory.
        """
        self.abort()
        with anyio.CancelScope(shield=True):
            await self.settled()
            if self._way is not None:
                await self._way.aclose()
            await self.sharing.aclose()
            await self._growth.aclose()

    def _close(self) -> None:
        if self._way is not None and not self._way.is_opening:
            self._way.close()  # else it is over with its opening, which nobody wants
        self.sharing.close()
        self.pool.close()
        self._growth.close()

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
            self._close()
            if self._link.is_open and not self._has_told:
                self._has_told = True
                logger.info(
                    "payload of the pipe to %s goes through host memory: %s",
                    self._link.peer.id,
                    str(exc) or "no answer in time",
                )

    async def _ask(self) -> None:
        if not (reason := await self.sharing.ask()):
            return
        try:
            await self._ask_nccl()
        except (AsyncKVError, OSError, TimeoutError) as exc:
            why = str(exc) or "no answer in time"
            raise ConfigError(f"{why}; nor by CUDA IPC: {reason}") from exc

    async def _share(self, stream: SharingStream, uuid: str) -> None:
        if reason := self.sharing.why_not(uuid):
            # Not the end of it: NCCL may be asked for, and is then soon.
            stream.leave(ConfigError(reason))
            self._link.call_when_lost(lambda _: self._is_asked.set())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(AGREE_S):
                    await self._is_asked.wait()
        else:
            await self.sharing.answer(stream)

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
        self._way = await GpuLink.make(self._link, self._device, self.digest)
        return self._way

    async def _allocate_for(self, way: GpuLink, description: bytes) -> None:
        """Allocate the memory of the GPU, unless the peer's goes not with this one."""
        own = DeviceDescription.decode(way.transport.describe())
        check_peer(own, DeviceDescription.decode(description))
        await self._growth.open()


def _lent(region: DeviceRegion, spec: TensorSpec) -> torch.Tensor:
    tensor = region.tensor(spec)
    region.hand_out()
    region.release()
    return tensor
