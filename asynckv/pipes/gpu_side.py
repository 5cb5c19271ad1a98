"""What one side of a pipe has on its GPU: memory there, and a way to the peer's GPU.

Until the way is open, and when it is lost, payload goes through the hosts' memory and
is brought to the GPU where it is wanted.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial

import anyio
import torch

from asynckv.devices.arena import DeviceRegion, place_of
from asynckv.devices.copying import CopyPool
from asynckv.devices.growth import Growth
from asynckv.devices.lanes import DeviceLanes
from asynckv.devices.names import Device
from asynckv.devices.opening import DeviceCalls, OpenDevice
from asynckv.devices.tensors import KVOnGpu, caught
from asynckv.errors import ConfigError, RemoteProtocolError
from asynckv.links.link import Link
from asynckv.links.options import Digest, device_digest, map_digest
from asynckv.pipes.shared_memory import AGREE_S, GpuSharing, Opening, why_not
from asynckv.protocol.handshake import DigestMode
from asynckv.protocol.transfer_frames import OpenDevices
from asynckv.protocol.values import Place
from asynckv.sharing.exporter import LEAST_NBYTES
from asynckv.sharing.gpu_channel import DeviceStream, GpuLink, NcclRoute
from asynckv.sharing.handshake import Handshake
from asynckv.tensors.views import spec_of
from asynckv.transfers.host_copies import D2HCopier, HostCopies
from asynckv.transfers.incoming import Route
from asynckv.transfers.source import GpuStaging, StagedTensor
from asynckv.types import TensorSpec
from asynckv.waits.waiting import OwnTasks

__all__ = (
    "GpuOpening",
    "GpuSide",
    "Placement",
)

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
        self._gpu_link: GpuLink | None = None
        self._openings = OwnTasks()
        self._has_told = False
        self._is_asked = asyncio.Event()

    @property
    def gpu_link(self) -> GpuLink | None:
        """What moves payload between two GPUs, while it does."""
        gpu_link = self._gpu_link
        return gpu_link if gpu_link is not None and gpu_link.is_open else None

    @property
    def agreed_link(self) -> GpuLink | None:
        """That, also while only the peer knows that it is open, or this side that it
        is over.
        """
        return self._gpu_link

    def ask(self) -> None:
        """Open the way: this side begins. Never waits."""
        self._open(self._ask)

    def answer(self, channel: DeviceStream, frame: OpenDevices) -> None:
        """Open the way that the peer has asked for. Never waits."""
        self._open(partial(self._answer, channel, frame))
        self._is_asked.set()

    def share(self, handshake: Handshake) -> None:
        """Share memory with the peer, which has asked for it. Never waits."""
        self._open(partial(self._share, handshake))

    async def settled(self) -> None:
        """Wait until the way is open, or is known not to be."""
        while len(self._openings):
            await self._openings.wait()

    async def let_meet(self) -> None:
        """Let both GPUs' workers meet that are about to, for 1 s. Shielded.

        To be called before the link is closed: the peer's could wait for this one in a
        call that nobody can end.
        """
        if self._gpu_link is not None and self._gpu_link.is_opening:
            await self._gpu_link.aclose()

    def abort(self) -> None:
        """Open nothing more, and close what is open. Never waits."""
        self._openings.cancel()
        self.close()

    async def wait_closed(self) -> None:
        """Wait until what was aborted is over: :meth:`abort` comes first."""
        await self.settled()
        if self._gpu_link is not None:
            await self._gpu_link.aclose()

    def close(self) -> None:
        """Close the way, unless it is being opened. Never waits."""
        if self._gpu_link is not None and not self._gpu_link.is_opening:
            # Else it is over with its opening, which nobody wants.
            self._gpu_link.close()

    def _open(self, opening: Opening) -> None:
        name = f"asynckv: connect GPUs with {self._link.peer.id}"
        self._openings.own(self._try(opening), name)

    async def _try(self, opening: Opening) -> None:
        if why := await why_not(opening):
            self._failed()
            if self._link.is_open and not self._has_told:
                self._has_told = True
                logger.info(
                    "payload of the pipe to %s goes through host memory: %s",
                    self._link.peer.id,
                    why,
                )

    async def _ask(self) -> None:
        if not (reason := await self._why_not_shared(self._sharing.ask)):
            return
        if why := await why_not(self._ask_nccl):
            raise ConfigError(f"{why}; nor by CUDA IPC: {reason}")

    async def _share(self, handshake: Handshake) -> None:
        reason = await self._why_not_shared(partial(self._sharing.answer, handshake))
        if reason and not self._is_asked.is_set():
            # Not the end of it: NCCL may be asked for, and is then soon.
            self._link.call_when_lost(lambda _: self._is_asked.set())
            try:
                async with asyncio.timeout(AGREE_S):
                    await self._is_asked.wait()
            except TimeoutError:
                raise ConfigError(reason) from None

    async def _why_not_shared(self, sharing: Opening) -> str:
        reason = await why_not(sharing)
        if reason:
            self._sharing.close()
        return reason

    async def _ask_nccl(self) -> None:
        gpu_link = await self._make_link()
        # Whenever it accepts the pipe: that is bounded by the link's life.
        await gpu_link.ask(self._memory.open, is_patient=True)

    async def _answer(self, channel: DeviceStream, frame: OpenDevices) -> None:
        with channel:
            gpu_link = await self._make_link()
            await gpu_link.answer(channel, frame.description, self._memory.open)

    async def _make_link(self) -> GpuLink:
        self._gpu_link = await GpuLink.make(self._link, self._device, self._digest)
        return self._gpu_link


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
        self._device = opened.device
        self._tensors = opened.gpus.tensors
        max_nbytes = max(2 * max_bytes, LEAST_NBYTES)
        self._growth = Growth(max_nbytes, device=opened.device)
        self.pool = CopyPool(
            device=opened.device,
            empty=self._growth.spares.spare,
            lanes=DeviceLanes.of(lambda: opened.gpus),
        )
        self.sharing = GpuSharing(
            *(link, opened.uuid, self._growth, self.pool, map_digest(digest))
        )
        self.opening = GpuOpening(
            *(link, opened.device, self._growth, self.sharing, self.digest),
            failed=self._close,
        )
        """Opens the way, and has it."""
        self._copies = HostCopies()
        """Of what is sent from the GPU through the host."""

    def spare(self, nbytes: int) -> DeviceRegion | None:
        """Take memory of the GPU, if there is so much now. Never waits."""
        regions = self._growth.take_on_device([max(nbytes, 1)])
        return None if regions is None else regions[0]

    async def staged(self, source: torch.Tensor | KVOnGpu) -> StagedTensor | None:
        """Return a copy of what is to be sent that is on the GPU.

        ``None`` where nothing leads on from there, or for lack of room. A cancelled
        call has made none, and ends when no GPU reads the source.

        :raises GPUFailed: the GPU failed
        """
        is_shared = self.sharing.is_open
        if not is_shared and self.opening.gpu_link is None:
            return None
        kind: DigestMode = self.sharing.digest if is_shared else self.digest
        is_digested = is_shared and kind == "full"  # else that is done while it leaves
        staging = GpuStaging(self._growth, self.pool, takes_host=is_shared)
        staged = await staging.staged(source, digest=is_digested)
        if staged is None or kind != "edges" or staged.region.edges:
            return staged
        try:
            (staged.region.edges,) = await self.pool.edges([staged.place()])
        except BaseException:
            staged.release()
            raise
        return staged

    def route(
        self, place: Place | None, digest: bytes, *, is_on_gpu: bool
    ) -> Route | None:
        """Return by what one tensor may come from the peer's GPU, or from its memory.

        ``place`` is where the peer shows it there, with the ``digest`` of that.
        """
        if place is not None:
            return self.sharing.route(place, digest)
        gpu_link = self.opening.gpu_link if is_on_gpu else None
        return None if gpu_link is None else NcclRoute(gpu_link, self.pool)

    def d2h(self, link: Link) -> D2HCopier:
        return D2HCopier(self.pool, self._copies, link.payload.feeds)

    def nccl(self, link: Link) -> GpuLink:
        """Return what the peer was told leads there, also when that is over."""
        if (gpu_link := self.opening.agreed_link) is None:
            raise RemoteProtocolError("a grant of memory that nothing leads to")
        return gpu_link

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
        await self.pool.copy([place_of(region, spec)], [target], digest=False)
        return into

    def abort(self) -> None:
        """Move nothing more, and give the memory back soon. Never waits."""
        self.opening.abort()
        self._close()

    async def aclose(self) -> None:
        """As :meth:`abort`, and wait for it: about 7 s at most. Shielded.

        Tensors that the application has keep the memory.
        """
        self.abort()
        with anyio.CancelScope(shield=True):
            await self.opening.wait_closed()
            await self.sharing.aclose()
            await self._growth.aclose()

    def _close(self) -> None:
        self.opening.close()
        self.sharing.close()
        self.pool.close()
        self._growth.close()


def _lent(region: DeviceRegion, spec: TensorSpec) -> torch.Tensor:
    tensor = region.tensor(spec)
    region.hand_out()
    region.release()
    return tensor


class Placement:
    """Copies of one pipe's tensors on ``device``, made by ``pool``.

    They are in memory of ``gpus`` where it has room: to allocate may wait for work of
    the GPU that waits for the peer.
    """

    def __init__(
        self, device: OpenDevice, pool: CopyPool, gpus: Callable[[], GpuSide | None]
    ) -> None:
        self._device = device
        self._gpus = gpus
        self._pool = pool
        self._calls = DeviceCalls()

    async def place(
        self, tensor: torch.Tensor, check: Callable[[], None]
    ) -> torch.Tensor:
        """Return a copy on the GPU, which has ended, for the caller's current stream.

        ``check`` is called before bytes move: it raises if nobody wants them any more.
        A cancelled call ends when no GPU and no thread is at either of the two.

        :raises GPUFailed: the GPU has no memory left, failed, or did not answer
        """
        spec, gpus = spec_of(tensor), self._gpus()
        made = None if gpus is None else gpus.made(spec)
        if made is None:
            made = await self._calls.call(self._device.maker(spec))
            check()
        await self._pool.copy([tensor], [made], digest=False)
        return made.tensor
