"""Copies of tensors on their way from this side's GPU to a peer's, on that GPU.

NCCL moves these alone, so that nobody has to abort it for the caller's memory to be
left alone, and by CUDA IPC a peer on the same GPU reads these alone. What finds no room
here goes through host memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from asynckv.buffers.part_landing import on_gpu
from asynckv.links.riding import rides
from asynckv.tensors.blocks import KVBlocks, KVMemory, spec_in
from asynckv.tensors.copying import CopyPool
from asynckv.tensors.cuda import DeviceMemory
from asynckv.tensors.device_regions import DeviceRegion
from asynckv.tensors.device_tensors import gpu_of
from asynckv.tensors.growth import Growth
from asynckv.tensors.on_gpu import KVOnGpu
from asynckv.tensors.paged_arena import PagedArena
from asynckv.types import TensorSpec

__all__ = (
    "GpuStaging",
    "Source",
    "StagedTensor",
    "are_staged",
    "places_of",
    "release_staged",
)


class StagedTensor:
    """A copy of one tensor, for whoever sends it, until it is released."""

    __slots__ = ("nbytes", "region", "spec")

    def __init__(self, region: DeviceRegion, spec: TensorSpec) -> None:
        self.spec = spec
        self.nbytes = spec.nbytes
        self.region = region

    def place(self) -> DeviceMemory:
        """Return its bytes; whoever has them keeps them.

        :raises RuntimeError: it was released
        """
        return on_gpu(self.region, self.spec)

    def release(self) -> None:
        """Let the memory be another's when nothing is at it any more. Never waits."""
        self.region.release()


Source: TypeAlias = KVMemory | StagedTensor | KVOnGpu
"""Where the bytes of what is sent come from."""


class GpuStaging:
    """Makes them in memory of ``growth``, by ``pool``, where that has room now.

    With ``takes_host`` also of what is in host memory. It has no room where it
    ``is_awaited`` by others.
    """

    def __init__(
        self,
        growth: Growth,
        pool: CopyPool,
        *,
        takes_host: bool = False,
        is_awaited: Callable[[], bool] = lambda: False,
    ) -> None:
        self._growth = growth
        self._pool = pool
        self._takes_host = takes_host
        self._is_awaited = is_awaited

    async def staged(self, memory: KVMemory | KVOnGpu) -> StagedTensor | None:
        """Return a copy of what is on this GPU, or may be; ``None`` of anything else,
        or for lack of room.

        A cancelled call has made none, and ends when no GPU reads ``memory``.

        :raises GPUFailed: the GPU failed
        """
        if not self._is_here(memory) or (region := self._take(memory.nbytes)) is None:
            return None
        staged = StagedTensor(region, spec_in(memory))
        try:
            # No variable: an error's traceback would keep the memory in use.
            await self._pool.copy([memory], [staged.place()], digest=False)
        except BaseException:
            staged.release()
            raise
        return staged

    def _is_here(self, memory: KVMemory | KVOnGpu) -> bool:
        pages = self._growth.device_pages
        if pages is None or not pages.is_open:
            return False
        if isinstance(memory, KVOnGpu):
            return memory.memory.device == pages.device.index
        tensor = memory.pool if isinstance(memory, KVBlocks) else memory
        gpu = gpu_of(tensor)
        return gpu == pages.device.index or (gpu is None and self._takes_host)

    def _take(self, nbytes: int) -> DeviceRegion | None:
        arena = self._growth.arena
        if self._is_awaited():
            return None
        region = arena.take_spare(nbytes) if isinstance(arena, PagedArena) else None
        return region if isinstance(region, DeviceRegion) else None


def places_of(sources: Sequence[Source]) -> list[KVMemory | DeviceMemory | KVOnGpu]:
    """Return where the bytes of each lie, for whoever copies or digests them."""
    return [s.place() if isinstance(s, StagedTensor) else s for s in sources]


def are_staged(sources: Sequence[Source]) -> bool:
    """Whether NCCL may send all that does not ride: copies on this side's GPU."""
    large = [source for source in sources if not rides(source.nbytes)]
    return bool(large) and all(isinstance(one, StagedTensor) for one in large)


def release_staged(sources: Sequence[Source]) -> None:
    """Nothing of them is sent any more. Never waits."""
    for source in sources:
        if isinstance(source, StagedTensor):
            source.release()
