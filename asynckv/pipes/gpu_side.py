"""What one side of a pipe has on its GPU: memory there, and a way to the peer's GPU.

Until the way is open, and when it is lost, payload goes through the hosts' memory and
is brought to the GPU where it is wanted.
"""

from __future__ import annotations

from collections.abc import Callable

import anyio
import torch

from asynckv.links.link import Link
from asynckv.links.options import Digest, device_digest, map_digest
from asynckv.pipes.gpu_sharing import GpuOpening, GpuSharing
from asynckv.protocol.handshake import DigestMode
from asynckv.sharing.exporter import LEAST_NBYTES
from asynckv.sharing.gpu_channel import NcclRoute
from asynckv.tensors.copying import CopyPool
from asynckv.tensors.cuda import DeviceMemory
from asynckv.tensors.device_calls import DeviceCalls
from asynckv.tensors.device_copying import DeviceCopyPool
from asynckv.tensors.device_regions import DeviceRegion
from asynckv.tensors.growth import Growth
from asynckv.tensors.on_gpu import KVOnGpu, caught
from asynckv.tensors.open_device import OpenDevice
from asynckv.tensors.views import spec_of
from asynckv.types import TensorSpec

__all__ = (
    "GpuSide",
    "Placing",
)


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
        self.pool = DeviceCopyPool(
            *(opened.device, lambda: opened.gpus), empty=self._growth.lending.spare
        )
        if (pages := self._growth.device_pages) is not None:
            pages.call_when_dropped(self.pool.lanes.close)
        self.sharing = GpuSharing(
            *(link, opened.uuid, self._growth, self.pool, map_digest(digest))
        )
        self.opening = GpuOpening(
            *(link, opened.device, self._growth, self.sharing, self.digest),
            failed=self._close,
        )
        """Opens the way, and has it."""

    def spare(self, nbytes: int) -> DeviceRegion | None:
        """Take memory of the GPU, if there is so much now. Never waits."""
        regions = self._growth.take_on_device([max(nbytes, 1)])
        return None if regions is None else regions[0]

    def spare_for(self, source: object, nbytes: int) -> DeviceRegion | None:
        """Take memory for what is sent from there, where it is to; as :meth:`spare`."""
        if isinstance(source, KVOnGpu):
            is_near = source.memory.device == self._device.index
            has_way = is_near and (self.sharing.is_open or self.opening.way is not None)
        else:  # from the host it goes by lanes
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

    def device_route(self) -> NcclRoute | None:
        """Return by what one tensor may come from the peer's GPU."""
        way = self.opening.way
        return None if way is None else NcclRoute(way, self.pool)

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
        self.opening.abort()
        self._close()

    async def aclose(self) -> None:
        """As :meth:`abort`, and wait for it: about 5 s at most. Shielded.

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


class Placing:
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
